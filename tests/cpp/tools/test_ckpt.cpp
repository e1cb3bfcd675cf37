// The checkpoint readers on broken input, in memory: valid files are made by our own writers, then
// cut, flipped, spliced and repeated. Every mutant must be read or refused; under the sanitizers a
// stray byte would show. The same seeds every time.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "pickle/plain.h"
#include "pickle/writer.h"
#include "tools/fuzz.h"

namespace {

using namespace lowbit::ckpt;

int passed = 0, missed = 0;

void expect(bool ok, const std::string& what) {
  (ok ? passed : missed) += 1;
  if (!ok) std::printf("FAILED: %s\n", what.c_str());
}

/// Bytes that a writer leaves in a file.
template <class Write>
std::string written(const Write& write) {
  const std::string path = std::filesystem::temp_directory_path() /
                           ("lowbit-test-" + std::to_string(std::random_device{}()));
  std::string bytes;
  {
    auto folder = NewDirectory::create(path, false);
    auto file = folder.value()->file("x");
    write(*file.value());
    expect(file.value()->close().ok(), "a file is written");
    expect(folder.value()->commit().ok(), "a folder takes its place");
    std::ifstream in(path + "/x", std::ios::binary);
    bytes.assign(std::istreambuf_iterator<char>(in), {});
  }
  std::filesystem::remove_all(path);
  return bytes;
}

std::string tensor_item(const char* dtype, const Shape& shape) {
  return written([&](Output& out) {
    ZipWriter zip(out);
    const Dtype& d = *find_dtype(dtype);
    expect(begin_tensor(zip, d, shape).ok(), "begin");
    const std::string data(elements(shape, "x").value() * static_cast<uint64_t>(d.bytes), 'v');
    expect(zip.data(data.data(), data.size()).ok() && finish_tensor(zip).ok(), "finish");
  });
}

std::string value_pickle() {
  const Value value = Value::tuple({Value::number(1 << 20), Value::boolean(true), Value::none(),
                                    Value::words("lr"), Value::floating(0.5),
                                    Value::list({Value::number(-7), Value::number(1ll << 40)})});
  PickleWriter pickle(2);
  write_value(pickle, value);
  return pickle.finish();
}

std::string value_item() {
  return written([](Output& out) {
    ZipWriter zip(out);
    expect(zip.record("data.pkl", value_pickle()).ok() && zip.close().ok(), "value");
  });
}

std::string metadata() {
  Manifest m;
  m.has_paths = true;
  const Dtype* f32 = find_dtype("float32");
  m.file_names = {"__0_0.distcp", "__1_0.distcp"};
  m.tensors.push_back({"a.weight",
                       {"model", "a.weight"},
                       f32,
                       {6, 4},
                       {{{0, 0}, {3, 4}, {0, 0, 0, 100}}, {{3, 0}, {3, 4}, {1, 0, 0, 100}}}});
  m.tensors.push_back({"b", {"b"}, find_dtype("uint8"), {}, {{{}, {}, {0, 0, 100, 50}}}});
  m.blobs.push_back({"lr", {"optim", Key(Key::Kind::kIndex, 0), "lr"}, {0, 0, 150, 20}});
  return metadata_bytes(m, "x");
}

std::string mutant(const std::string& from, const std::vector<std::string>& all,
                   std::mt19937& rng) {
  std::string s = from;
  const auto below = [&](size_t n) { return n == 0 ? 0 : rng() % n; };
  for (size_t edits = 1 + below(3); edits > 0 && !s.empty(); --edits) {
    switch (below(6)) {
      case 0:
        s[below(s.size())] ^= static_cast<char>(1u << below(8));
        break;
      case 1:
        s[below(s.size())] = static_cast<char>(rng());
        break;
      case 2:
        s.resize(below(s.size()));
        break;
      case 3:
        s.insert(below(s.size()), s.substr(below(s.size()), below(40)));
        break;
      case 4:
        s.erase(below(s.size()), below(20));
        break;
      default: {
        const std::string& other = all[below(all.size())];
        s.replace(below(s.size()), below(30), other.substr(below(other.size()), below(30)));
      }
    }
  }
  return s;
}

void test_mutants() {
  std::vector<std::string> seeds = {std::string(1, 1) + metadata(),
                                    std::string(1, 2) + value_item(),
                                    std::string(1, 3) + tensor_item("float32", {3, 5}),
                                    std::string(1, 3) + tensor_item("float8_e4m3fn", {7}),
                                    std::string(1, 3) + tensor_item("bfloat16", {0, 4}),
                                    std::string(1, 3) + tensor_item("uint8", {})};
  seeds.push_back(std::string(1, 0) + value_pickle());
  for (const std::string& seed : seeds)
    expect(read_untrusted(seed), "what our writers write is read, kind " + std::to_string(seed[0]));
  std::mt19937 rng(1);
  size_t accepted = 0;
  constexpr size_t kMutants = 30000;
  for (size_t i = 0; i < kMutants; ++i)
    accepted += read_untrusted(mutant(seeds[i % seeds.size()], seeds, rng));
  std::printf("%zu mutants: %zu accepted, %zu refused\n", kMutants, accepted, kMutants - accepted);
  expect(accepted > 0 && accepted < kMutants / 3,
         "most mutants are refused, and a few are harmless");
}

void test_every_cut() {
  const std::string item = std::string(1, 3) + tensor_item("float32", {3, 5}),
                    meta = std::string(1, 1) + metadata();
  for (const std::string& whole : {item, meta}) {
    bool all = true;
    for (size_t n = 0; n < whole.size(); ++n) all = all && !read_untrusted(whole.substr(0, n));
    expect(all, "a file that is cut anywhere is refused");
  }
  bool all = true;
  for (size_t n = 1; n < 40; ++n)
    all = all && !read_untrusted(item + std::string(n, '\0')) &&
          !read_untrusted(item.substr(0, 1) + std::string(n, 'x') + item.substr(1));
  expect(all, "junk before or behind a zip is refused");
}

void test_zip_tricks() {
  const std::string item = tensor_item("float32", {3, 5});
  const auto with = [&](const std::string& from, const std::string& to, size_t nth) {
    std::string s = item;
    size_t at = s.find(from);
    for (; nth > 0; --nth) at = s.find(from, at + 1);
    return std::string(1, 3) + s.replace(at, to.size(), to);
  };
  expect(read_untrusted(std::string(1, 3) + item), "the item itself");
  expect(!read_untrusted(with("archive/byteorder", "archive/data.pkl\0", 1)),
         "a second name in the directory only");
  expect(!read_untrusted(with("data/0", "data/1", 0)), "a local name that is another");
  expect(!read_untrusted(with("FloatStorage", "MixedStorage", 0)),
         "a storage class outside the allowlist");
  expect(!read_untrusted(with("_rebuild_tensor_v2", "_rebuild_sparse_v2", 0)),
         "a function outside the allowlist");
  std::string packed = item;
  const size_t central = packed.find(std::string("PK\x01\x02", 4));
  packed[central + 10] = 8;
  expect(!read_untrusted(std::string(1, 3) + packed), "a compressed record");
  packed[central + 10] = 0;
  packed[central + 8] |= 1;
  expect(!read_untrusted(std::string(1, 3) + packed), "an encrypted record");
}

void test_depth() {
  std::string deep = "\x80\x04";
  for (int i = 0; i < 60000; ++i) deep += "]";
  for (int i = 0; i < 59999; ++i) deep += "a";
  expect(read_untrusted(std::string(1, 0) + deep + "."), "60,000 nested lists are no danger");
  std::string cyclic = "\x80\x04]q";
  cyclic += '\0';
  cyclic += "h";
  cyclic += '\0';
  expect(read_untrusted(std::string(1, 0) + cyclic + "a."),
         "a list that holds itself is no danger");
}

}  // namespace

int main() {
  test_mutants();
  test_every_cut();
  test_zip_tricks();
  test_depth();
  std::printf("%d passed, %d failed\n", passed, missed);
  return missed == 0 ? 0 : 1;
}
