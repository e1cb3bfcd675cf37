// The tables that steps over the same tensors leave on the device: written once, then used by each
// step. No torch and no CUDA headers.
//
//   memory    A table is used on the stream that it was allocated on, so its memory may return to
//             torch's allocator, which orders by streams, at any time. On another stream a step
//             writes another one.
//   graphs    A captured step uses the table of the step before, on whatever stream: a graph runs
//             behind what the warm-up steps did to the state. The graph keeps the memory, since the
//             optimizer may free it first. Without a table from before, the graph writes one of
//             its own in each run.
//   contents  What a table holds is the same for all steps; what `prepare` adds belongs to one
//             step, and steps follow one another as their state makes them do.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "cuda/library.h"

namespace lowbit::cuda {

/// Memory on the device, allocated on the current stream and freed with its last owner.
struct TableMemory {
  void* at = nullptr;
  std::shared_ptr<void> owner;
};
using AllocateTable = std::function<TableMemory(int64_t bytes)>;

/// The tables of one prepared step, one for each phase.
class Tables {
 public:
  /// Runs a phase. call: without plan and workspace; the jobs must be those of the calls before,
  /// except for their gradients, or `clear` must have been called.
  const char* step(const Library& library, CudaStep& call, const AllocateTable& allocate);
  /// The same without a table that stays.
  static const char* step_once(const Library& library, CudaStep& call,
                               const AllocateTable& allocate);
  void clear() { phases_.clear(); }

 private:
  struct Table {
    void* stream = nullptr;
    std::shared_ptr<CudaPlan> plan;
    TableMemory memory;
  };
  static const char* make(const Library& library, CudaStep& call, const AllocateTable& allocate,
                          Table& table);
  std::vector<Table> phases_;
};

}  // namespace lowbit::cuda
