// What a captured graph keeps alive. Host code.
#include "cuda/abi.h"
#include "cuda/explain.h"

namespace lowbit::cuda {
namespace {

cudaError_t graph_of(cudaStream_t stream, cudaStreamCaptureStatus* status, cudaGraph_t* graph) {
  unsigned long long id = 0;
#if CUDART_VERSION >= 13000
  return cudaStreamGetCaptureInfo(stream, status, &id, graph, nullptr, nullptr, nullptr);
#else
  return cudaStreamGetCaptureInfo_v2(stream, status, &id, graph, nullptr, nullptr);
#endif
}

const char* retain(cudaStream_t stream, void* owned, void (*release)(void*), bool* captures) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
  *captures = false;
  if (const char* error = explain(graph_of(stream, &status, &graph), "looking at a stream"))
    return error;
  *captures = status == cudaStreamCaptureStatusActive;
  if (!*captures || owned == nullptr) return nullptr;
  cudaUserObject_t object = nullptr;
  if (const char* error =
          explain(cudaUserObjectCreate(&object, owned, release, 1, cudaUserObjectNoDestructorSync),
                  "keeping a table for a graph"))
    return error;
  return explain(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove),
                 "giving a table to a graph");
}

}  // namespace
}  // namespace lowbit::cuda

extern "C" __attribute__((visibility("default"))) const char* lowbit_cuda_retain(
    int device, void* stream, void* owned, void (*release)(void*), bool* captures) {
  if (const char* error = lowbit::cuda::explain(cudaSetDevice(device), "choosing the device"))
    return error;
  return lowbit::cuda::retain(static_cast<cudaStream_t>(stream), owned, release, captures);
}
