#include "cuda/tables.h"

#include <mutex>
#include <utility>

namespace lowbit::cuda {
namespace {

/// Memory whose graph has ended. A graph ends in a thread of the driver, where nothing may be asked
/// of CUDA, so the memory waits for the next step. Never destroyed: graphs may end later.
struct Ended {
  std::mutex mutex;
  std::vector<std::shared_ptr<void>> memory;
};
Ended& ended() {
  static auto* all = new Ended;
  return *all;
}

void end_of_graph(void* owned) {
  const std::unique_ptr<std::shared_ptr<void>> memory(static_cast<std::shared_ptr<void>*>(owned));
  Ended& e = ended();
  const std::lock_guard<std::mutex> lock(e.mutex);
  e.memory.push_back(std::move(*memory));
}

void free_ended() {
  std::vector<std::shared_ptr<void>> memory;  // freed without the lock
  Ended& e = ended();
  const std::lock_guard<std::mutex> lock(e.mutex);
  memory.swap(e.memory);
}

}  // namespace

const char* Tables::make(const Library& library, CudaStep& call, const AllocateTable& allocate,
                         Table& table) {
  CudaPlan* plan = nullptr;
  int64_t bytes = 0;
  if (const char* error = library.plan(&call, &plan, &bytes)) return error;
  std::shared_ptr<CudaPlan> owned(plan, library.discard);
  table.memory = allocate(bytes);  // which throws where there is no memory: then there is no table
  table.plan = std::move(owned);
  table.stream = call.stream;
  call.plan = plan, call.workspace = table.memory.at, call.writes = true;
  return library.step(&call);
}

const char* Tables::step_once(const Library& library, CudaStep& call,
                              const AllocateTable& allocate) {
  Table table;
  return make(library, call, allocate, table);
}

const char* Tables::step(const Library& library, CudaStep& call, const AllocateTable& allocate) {
  const auto phase = static_cast<size_t>(call.phase);
  if (phases_.size() <= phase) phases_.resize(phase + 1);
  Table& table = phases_[phase];
  auto owned = std::make_unique<std::shared_ptr<void>>(table.memory.owner);
  bool captures = false;
  if (const char* error = library.retain(
          call.device, call.stream, table.plan ? owned.get() : nullptr, end_of_graph, &captures))
    return error;
  if (captures) {
    if (!table.plan) return step_once(library, call, allocate);
    static_cast<void>(owned.release());  // the graph's
  } else {
    free_ended();
  }
  if (table.plan && (captures || table.stream == call.stream)) {
    call.plan = table.plan.get(), call.workspace = table.memory.at, call.writes = false;
    return library.step(&call);
  }
  table = {};
  const char* error = make(library, call, allocate, table);
  if (error != nullptr) table = {};
  return error;
}

}  // namespace lowbit::cuda
