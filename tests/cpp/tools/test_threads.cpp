// What reads and writes on several threads: a directory written, verified, resharded and read by
// overlapping boxes, and a rank's file. The bytes are those of one thread. `make sanitize
// SANITIZE=thread` runs it under the thread sanitizer, which sees every pair of accesses that race.
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "container/common/open.h"
#include "container/dcp/rank_file.h"
#include "container/dcp/recorded.h"
#include "container/dcp/verified_reader.h"
#include "dialect/numbers/adapters.h"
#include "io/parallel.h"
#include "pipeline/commands.h"

namespace {

using namespace lowbit::ckpt;
namespace fs = std::filesystem;

constexpr int kThreads = 4;
constexpr size_t kTensors = 24;

/// The value of an element tells its tensor and place.
float value_of(size_t tensor, uint64_t element) {
  return static_cast<float>(tensor * 1'000'003 + element);
}

std::shared_ptr<Source> counting(size_t tensor) {
  return source_by([tensor](uint64_t first, uint64_t count, void* out) {
    for (uint64_t i = 0; i < count; ++i) {
      const float x = value_of(tensor, first + i);
      std::memcpy(static_cast<char*>(out) + i * sizeof x, &x, sizeof x);
    }
    return fine();
  });
}

Shape shape_of(size_t tensor) {
  const auto n = static_cast<int64_t>(tensor);
  if (tensor % 5 == 0) return {n + 7};
  return {40 + n % 3, 60 + n, 1 + n % 2};
}

std::string name_of(size_t tensor) { return "t" + std::to_string(tensor); }

Document document() {
  Document out;
  for (size_t i = 0; i < kTensors; ++i) {
    Leaf leaf;
    leaf.path = {"model", name_of(i)};
    leaf.dtype = find_dtype("float32");
    leaf.shape = shape_of(i);
    leaf.source = counting(i);
    out.leaves.push_back(std::move(leaf));
  }
  return out;
}

class Folder {
 public:
  Folder() {
    path_ = fs::temp_directory_path() / ("lowbit-test-" + std::to_string(std::random_device{}()));
    fs::create_directory(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ / name; }

 private:
  fs::path path_;
};

/// Options with a progress function that one thread at a time may call, as all are promised.
WriteOptions options(int threads, int64_t ranks) {
  WriteOptions out;
  out.threads = threads;
  out.mesh.parts = {ranks};
  out.progress = [](uint64_t, uint64_t) {
    static std::atomic<int> inside = 0;
    const bool alone = inside++ == 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    --inside;
    return alone;  // false stops the writer
  };
  return out;
}

std::string digest_of(const std::string& path) {
  InspectOptions wanted;
  wanted.digest = true;
  const auto said = inspect(path, wanted);
  return said.ok() ? said.value()["digest"].dump() : said.error().text;
}

void test_directories(const Folder& folder) {
  check(write_dcp(document(), folder / "one", options(1, 1)).ok(), "one thread writes");
  check(write_dcp(document(), folder / "many", options(kThreads, 3)).ok(), "threads write");
  VerifyOptions verified;
  verified.threads = kThreads;
  verified.progress = options(1, 1).progress;
  check(verify(folder / "many", verified).ok(), "threads verify");
  ReshardOptions resharded;
  resharded.write = options(kThreads, 5);
  check(reshard(folder / "many", folder / "other", resharded).ok(), "threads reshard");
  if (::failed > 0) return;
  const std::string digest = digest_of(folder / "one");
  check(digest == digest_of(folder / "many") && digest == digest_of(folder / "other"),
        "the values are those of one thread");
}

/// Boxes that several threads read from the same chunks, through one cache of headers.
void test_boxes(const Folder& folder) {
  const auto manifest = read_dcp(folder / "many");
  const auto recorded = read_recorded(manifest.value());
  for (const bool verified : {true, false}) {
    PayloadCache cache;
    VerifiedReader reader(manifest.value(), &*recorded.value(), verified, cache);
    const auto& tensors = manifest.value().tensors;
    const Status done = parallel(8 * tensors.size(), kThreads, [&](size_t i) -> Status {
      const Tensor& tensor = tensors[i % tensors.size()];
      Box box{Shape(tensor.shape.size(), 0), tensor.shape};
      box.offset[0] = static_cast<int64_t>(i / tensors.size());
      box.shape[0] -= box.offset[0];
      std::vector<float> out(volume(box.shape));
      RETURN_IF_ERROR(reader.read(tensor, box, reinterpret_cast<char*>(out.data())));
      const auto number = static_cast<size_t>(std::stoul(tensor.name.substr(sizeof "model.t" - 1)));
      const uint64_t row = volume(tensor.shape) / static_cast<uint64_t>(tensor.shape[0]);
      const uint64_t first = row * static_cast<uint64_t>(box.offset[0]);
      for (size_t k = 0; k < out.size(); ++k) {
        if (out[k] != value_of(number, first + k)) return bad(tensor.name + ": other values");
      }
      return fine();
    });
    check(done.ok() && reader.finish().ok(), "threads read boxes");
  }
}

void test_rank_file(const Folder& folder) {
  std::vector<float> values(50'000);
  std::iota(values.begin(), values.end(), 0.0f);
  std::vector<RankItem> items;
  for (int64_t i = 0; i < 12; ++i) {
    RankItem item;
    item.name = name_of(static_cast<size_t>(i));
    item.dtype = find_dtype("float32");
    item.shape = {1000 + i, 37};
    item.data = reinterpret_cast<const char*>(values.data());
    items.push_back(std::move(item));
  }
  std::vector<std::string> digests[2];
  for (const int threads : {1, kThreads}) {
    const std::string name = "rank-" + std::to_string(threads);
    fs::create_directory(folder / name);
    const auto file = RankFile::create(folder / name, "__0_0.distcp", threads > 1);
    const auto written = file.value()->write(items, threads, options(1, 1).progress);
    check(written.ok() && file.value()->sync().ok(), "a rank's file is written");
    for (const RankWritten& item : written.value())
      digests[threads > 1].push_back(std::to_string(item.offset) + " " + item.digest.whole);
  }
  check(digests[0] == digests[1], "items lie where one thread puts them");
}

/// Leaves that read one source, each by another thread: one at a time is inside.
void test_one_source_of_many_leaves(const Folder& folder) {
  static std::atomic<int> inside = 0;
  static std::atomic<bool> alone = true;
  const auto source = source_by([](uint64_t first, uint64_t count, void* out) {
    if (inside++ != 0) alone = false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    for (uint64_t i = 0; i < count; ++i) {
      const float x = value_of(0, first + i);
      std::memcpy(static_cast<char*>(out) + i * sizeof x, &x, sizeof x);
    }
    --inside;
    return fine();
  });
  Document made;
  for (size_t i = 0; i < kTensors; ++i) {
    Leaf leaf;
    leaf.path = {"scales", name_of(i)};
    leaf.dtype = find_dtype("float32");
    leaf.shape = {100};
    leaf.source = every_other(source, i % 2);
    made.leaves.push_back(std::move(leaf));
  }
  check(write_dcp(made, folder / "shared", options(kThreads, 2)).ok(), "threads write");
  check(alone, "one thread at a time reads a source");
}

/// The error is that of the first item that failed, whichever thread had it.
void test_failures() {
  for (size_t round = 0; round < 200; ++round) {
    const Status done = parallel(64, kThreads, [&](size_t i) -> Status {
      return i % 16 == round % 16 ? Status(bad(std::to_string(i))) : fine();
    });
    check(!done.ok() && done.error().text == std::to_string(round % 16), "the first failure");
  }
}

}  // namespace

int main() {
  const Folder folder;
  test_directories(folder);
  if (::failed == 0) test_boxes(folder);
  test_rank_file(folder);
  test_failures();
  test_one_source_of_many_leaves(folder);
  return finish();
}
