#include "cuda/library.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace lowbit::cuda {
namespace {

// torch declares this function since 2.11, and libtorch_cuda exports it. A CPU build of torch lacks
// it, so it is looked up at run time.
using TorchStreamFn = int32_t (*)(int32_t device, void** stream);
TorchStreamFn torch_stream = nullptr;

void* current_stream(int device) {
  void* stream = nullptr;
  if (torch_stream(device, &stream) != 0) {  // null would be the legacy stream, which waits for all
    throw std::runtime_error("torch has no current stream on CUDA device " +
                             std::to_string(device));
  }
  return stream;
}

template <class Fn>
bool find(void* handle, const char* name, Fn& fn) {
  fn = reinterpret_cast<Fn>(dlsym(handle, name));
  return fn != nullptr;
}

const char* open(Library& library) {
  Dl_info here;
  if (dladdr(reinterpret_cast<void*>(&open), &here) == 0)
    return "the lowbit operators cannot find their own file";
  const std::string path(here.dli_fname);
  const std::string sibling = path.substr(0, path.find_last_of('/') + 1) + "_cuda.so";
  void* handle = dlopen(sibling.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    static std::string text = "lowbit was built without CUDA, or its CUDA library does not load (" +
                              std::string(dlerror()) +
                              "); install a CUDA toolkit (nvcc) and build again";
    return text.c_str();
  }
  CudaAbiFn abi = nullptr;
  if (!find(handle, "lowbit_cuda_abi", abi) || abi() != kCudaAbi)
    return "_cuda.so is of another lowbit version; build again";
  if (!find(handle, "lowbit_cuda_plan", library.plan) ||
      !find(handle, "lowbit_cuda_discard", library.discard) ||
      !find(handle, "lowbit_cuda_retain", library.retain) ||
      !find(handle, "lowbit_cuda_step", library.step) ||
      !find(handle, "lowbit_cuda_quantize", library.quantize) ||
      !find(handle, "lowbit_cuda_dequantize", library.dequantize) ||
      !find(handle, "lowbit_cuda_accumulate", library.accumulate) ||
      !find(handle, "lowbit_cuda_means", library.means) ||
      !find(handle, "lowbit_cuda_allocate", library.allocate) ||
      !find(handle, "lowbit_cuda_free", library.free) ||
      !find(handle, "lowbit_cuda_prefetch", library.prefetch) ||
      !find(handle, "lowbit_cuda_lowrank", library.lowrank) ||
      !find(handle, "lowbit_cuda_newton_schulz", library.newton_schulz) ||
      !find(handle, "lowbit_cuda_row_moments", library.row_moments) ||
      !find(handle, "lowbit_cuda_product", library.product)) {
    return "_cuda.so lacks a function of its interface; build again";
  }
  void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  if (torch_cuda == nullptr ||
      !find(torch_cuda, "aoti_torch_get_current_cuda_stream", torch_stream)) {
    return "this torch has no CUDA (libtorch_cuda.so is not loaded)";
  }
  library.current_stream = current_stream;
  return nullptr;
}

}  // namespace

const Library& library() {
  static const Library opened = [] {
    Library l{};
    l.error = open(l);
    return l;
  }();
  return opened;
}

}  // namespace lowbit::cuda
