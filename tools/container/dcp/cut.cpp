#include "container/dcp/cut.h"

namespace lowbit::ckpt {
namespace {

void cut_along(const Mesh& mesh, size_t i, int64_t rank, const Box& box, std::vector<Cut>& out) {
  if (i == mesh.parts.size()) {
    out.push_back({rank, box});
    return;
  }
  const auto d = static_cast<size_t>(mesh.dims[i]);
  const int64_t parts = mesh.parts[i];
  if (d >= box.shape.size()) return cut_along(mesh, i + 1, rank * parts, box, out);
  const int64_t size = box.shape[d], part = std::max<int64_t>(1, size / parts + (size % parts > 0));
  for (int64_t p = 0, at = 0; at < size; ++p, at += part) {
    Box mine = box;
    mine.offset[d] += at;
    mine.shape[d] = std::min(part, size - at);
    cut_along(mesh, i + 1, rank * parts + p, mine, out);
  }
}

}  // namespace

Status check_mesh(const Mesh& mesh) {
  constexpr int64_t kMax = 65536;
  if (mesh.parts.empty() || mesh.parts.size() != mesh.dims.size())
    return usage("a mesh needs one tensor dimension for each of its own");
  int64_t ranks = 1;
  for (size_t i = 0; i < mesh.parts.size(); ++i) {
    if (mesh.parts[i] < 1 || mesh.parts[i] > kMax || (ranks *= mesh.parts[i]) > kMax)
      return usage("a mesh has 1 to 65536 ranks");
    if (mesh.dims[i] < 0 || mesh.dims[i] > 63) return usage("tensor dimensions are counted from 0");
  }
  return fine();
}

std::vector<Cut> cut(const Shape& shape, const Mesh& mesh) {
  std::vector<Cut> out;
  const Box whole{Shape(shape.size(), 0), shape};
  if (volume(shape) > 0) cut_along(mesh, 0, 0, whole, out);
  if (out.empty()) out.push_back({0, whole});
  return out;
}

}  // namespace lowbit::ckpt
