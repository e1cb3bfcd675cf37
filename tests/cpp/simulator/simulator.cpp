// simulator.h over GPGPU-Sim's functional simulation: instructions are executed, time is not
// modeled.
#include "simulator.h"

#include <cstdio>
#include <cstdlib>

#include "libcuda/gpgpu_context.h"
#include "src/cuda-sim/cuda-sim.h"
#include "src/cuda-sim/ptx_ir.h"
#include "src/cuda-sim/ptx_parser.h"
#include "src/gpgpu-sim/gpu-sim.h"

gpgpu_context* GPGPU_Context();
/// Of the patched simulator (docs/kernels/cuda-tests.md).
extern void (*host_access)(unsigned long long at, size_t bytes, bool written, const void*);

namespace simulator {
namespace {

void (*watcher)(const void*, size_t, bool) = nullptr;

/// The process's one GPU, with the symbols of one PTX file.
struct Gpu {
  gpgpu_context* context = GPGPU_Context();
  gpgpu_sim* device = nullptr;
  symbol_table* symbols = nullptr;

  Gpu() {
    const char* file = std::getenv("LOWBIT_PTX");
    if (file == nullptr) {
      std::fprintf(stderr, "LOWBIT_PTX names no file\n");
      std::exit(2);
    }
    context->GPGPUSim_Init();
    context->func_sim->g_ptx_sim_mode = 1;  // functional
    device = context->the_gpgpusim->g_the_gpu;
    symbols = context->gpgpu_ptx_sim_load_ptx_from_filename(file);
    context->api->load_static_globals(symbols, STATIC_ALLOC_LIMIT, 0xFFFFFFFF, device);
    context->api->load_constants(symbols, STATIC_ALLOC_LIMIT, device);
  }
};

Gpu& gpu() {
  static Gpu* made = new Gpu;  // never destroyed: its parts outlive main in no known order
  return *made;
}

}  // namespace

unsigned long long launch(const char* kernel, unsigned blocks, unsigned threads,
                          const std::vector<Argument>& arguments) {
  Gpu& on = gpu();
  function_info* function = on.symbols->lookup_function(kernel);
  if (function == nullptr) {
    std::fprintf(stderr, "the PTX has no kernel %s\n", kernel);
    std::exit(2);
  }
  kernel_info_t grid(dim3(blocks, 1, 1), dim3(threads, 1, 1), function,
                     on.device->getNameArrayMapping(), on.device->getNameInfoMapping());
  int number = 0;
  for (const Argument& argument : arguments) {
    gpgpu_ptx_sim_arg given(argument.at, argument.bytes, argument.offset);
    function->add_param_data(number++, &given);
  }
  function->finalize(grid.get_param_memory());
  const unsigned before = on.context->func_sim->g_ptx_sim_num_insn;  // wraps around
  on.device->functional_launch(&grid);
  on.context->func_sim->gpgpu_cuda_ptx_sim_main_func(grid, true);
  on.device->finish_functional_sim(&grid);
  return static_cast<unsigned>(on.context->func_sim->g_ptx_sim_num_insn) - before;
}

void watch(void (*seen)(const void*, size_t, bool)) {
  watcher = seen;
  host_access = seen == nullptr
                    ? nullptr
                    : +[](unsigned long long at, size_t bytes, bool written, const void*) {
                        watcher(reinterpret_cast<const void*>(at), bytes, written);
                      };
}

}  // namespace simulator
