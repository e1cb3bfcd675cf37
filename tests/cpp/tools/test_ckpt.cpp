// The checkpoint readers on broken input: files of our writers and the corpora of the fuzzers, cut,
// flipped, spliced and repeated. Every mutant must be read or rejected; the sanitizers detect a
// stray access. Seeds are fixed.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "container/dcp/dcp.h"
#include "container/pickled/item.h"
#include "fuzz/targets.h"
#include "io/write/new_directory.h"
#include "pickle/plain.h"
#include "pickle/writer.h"

namespace {

using namespace lowbit::ckpt;

bool accepts(const char* target, std::string_view input) {
  return find_fuzz_target(target)->read(input);
}

/// The bytes that a writer leaves in a file.
template <class Write>
std::string written(const Write& write) {
  const std::string path = std::filesystem::temp_directory_path() /
                           ("lowbit-test-" + std::to_string(std::random_device{}()));
  std::string bytes;
  {
    auto folder = NewDirectory::create(path, false, NewDirectory::Kind::kDcp);
    auto file = folder.value()->file("x");
    write(*file.value());
    check(file.value()->close().ok(), "a file is written");
    check(folder.value()->commit().ok(), "a folder is published");
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
    check(begin_tensor(zip, d, shape).ok(), "begin");
    const std::string data(elements(shape, "x").value() * static_cast<uint64_t>(d.bytes), 'v');
    check(zip.data(data.data(), data.size()).ok() && finish_tensor(zip).ok(), "finish");
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
    check(zip.record("data.pkl", value_pickle()).ok() && zip.close().ok(), "value");
  });
}

std::string metadata() {
  Manifest m;
  m.has_paths = true;
  const Dtype* f32 = find_dtype("float32");
  m.file_names = {"__0_0.distcp", "__1_0.distcp"};
  m.tensors.push_back({"model.a.weight",
                       {"model", "a.weight"},
                       f32,
                       {6, 4},
                       {{{0, 0}, {3, 4}, {0, 0, 0, 100}}, {{3, 0}, {3, 4}, {1, 0, 0, 100}}}});
  m.tensors.push_back({"b", {"b"}, find_dtype("uint8"), {}, {{{}, {}, {0, 0, 100, 50}}}});
  m.blobs.push_back({"optim.0.lr", {"optim", Key(Key::Kind::kIndex, 0), "lr"}, {0, 0, 150, 20}});
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

/// The files of a target's corpus, by name. The tests skip missing ones.
std::vector<std::string> corpus(const char* target) {
  std::vector<std::filesystem::path> paths;
  std::error_code none;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::filesystem::path(LOWBIT_CORPUS) / target, none)) {
    if (entry.is_regular_file()) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> out;
  for (const auto& path : paths) {
    std::ifstream in(path, std::ios::binary);
    out.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  return out;
}

/// The output of our writers, for targets that read it.
std::vector<std::string> written_for(const std::string& target) {
  if (target == "pickle" || target == "value") return {value_pickle()};
  if (target == "metadata") return {metadata()};
  if (target == "join") {
    const std::string part = metadata();
    return {little(part.size(), 2) + part + part};
  }
  if (target == "zip") return {tensor_item("float32", {3, 5}), value_item()};
  if (target == "value_item") return {value_item()};
  if (target == "tensor_item")
    return {tensor_item("float32", {3, 5}), tensor_item("float8_e4m3fn", {7}),
            tensor_item("bfloat16", {0, 4}), tensor_item("uint8", {})};
  return {};
}

/// Reads mutants that keep lengths and checksums true (fuzz/mutate.h). Returns how many are
/// accepted.
size_t formatted_mutants(const FuzzTarget& target, const std::vector<std::string>& seeds,
                         size_t count) {
  constexpr size_t kMost = 1u << 16;
  Dice dice{std::mt19937(2), {}};
  dice.bytes = [&](std::string& bytes, size_t most) {
    bytes = mutant(bytes, {bytes, "\xff\xff\xff\xff", std::string(8, '\0')}, dice.rng);
    if (bytes.size() > most) bytes.resize(most);
  };
  size_t accepted = 0;
  for (size_t i = 0; i < count; ++i) {
    std::string input = seeds[i % seeds.size()];
    target.mutate(input, kMost, dice);
    accepted += target.read(input);
  }
  return accepted;
}

void test_targets() {
  for (const FuzzTarget& target : fuzz_targets()) {
    // A folder is made on disk for each, in ten times as long as others take.
    const size_t mutants = target.mutate == mutate_folder ? 2000 : 6000;
    const std::string name = target.name;
    std::vector<std::string> seeds = written_for(name);
    for (const std::string& seed : seeds)
      check(name == "join" || target.read(seed), name + ": what our writers write is read");
    const auto kept = corpus(target.name);
    check(!kept.empty(), name + ": has a corpus in tests/ckpt/corpus");
    size_t read = 0;
    for (const std::string& input : kept) read += target.read(input);
    seeds.insert(seeds.end(), kept.begin(), kept.end());
    if (seeds.empty()) continue;
    std::mt19937 rng(1);
    size_t accepted = 0;
    for (size_t i = 0; i < mutants; ++i)
      accepted += target.read(mutant(seeds[i % seeds.size()], seeds, rng));
    const size_t knowing = formatted_mutants(target, seeds, mutants / 3);
    std::printf(
        "%-12s %zu of %zu files of its corpus accepted, %zu of %zu mutants, %zu of %zu that "
        "know the format\n",
        target.name, read, kept.size(), accepted, mutants, knowing, mutants / 3);
    check(read > 0, name + ": its corpus has sound inputs");
    check(accepted > 0 && accepted < mutants / 2,
          name + ": most mutants are refused, and a few are harmless");
  }
}

void test_every_cut() {
  const std::string item = tensor_item("float32", {3, 5});
  for (const auto& [target, whole] :
       {std::pair{"tensor_item", item}, std::pair{"metadata", metadata()}}) {
    bool all = true;
    for (size_t n = 0; n < whole.size(); ++n) all = all && !accepts(target, whole.substr(0, n));
    check(all, "a file that is cut anywhere is refused");
  }
  bool all = true;
  for (size_t n = 1; n < 40; ++n)
    all = all && !accepts("tensor_item", item + std::string(n, '\0')) &&
          !accepts("tensor_item", std::string(n, 'x') + item);
  check(all, "junk before or behind a zip is refused");
}

void test_zip_tricks() {
  const std::string item = tensor_item("float32", {3, 5});
  const auto with = [&](const std::string& from, const std::string& to, size_t nth) {
    std::string s = item;
    size_t at = s.find(from);
    for (; nth > 0; --nth) at = s.find(from, at + 1);
    return s.replace(at, to.size(), to);
  };
  check(accepts("tensor_item", item), "the item itself");
  check(!accepts("tensor_item", with("archive/byteorder", "archive/data.pkl\0", 1)),
        "a second name in the directory only");
  check(!accepts("tensor_item", with("data/0", "data/1", 0)), "a local name that is another");
  check(!accepts("tensor_item", with("FloatStorage", "MixedStorage", 0)),
        "a storage class outside the allowlist");
  check(!accepts("tensor_item", with("_rebuild_tensor_v2", "_rebuild_sparse_v2", 0)),
        "a function outside the allowlist");
  std::string packed = item;
  const size_t central = packed.find(std::string("PK\x01\x02", 4));
  packed[central + 10] = 8;
  check(!accepts("tensor_item", packed), "a compressed record");
  packed[central + 10] = 0;
  packed[central + 8] |= 1;
  check(!accepts("tensor_item", packed), "an encrypted record");
}

void test_depth() {
  std::string deep = "\x80\x04";
  for (int i = 0; i < 60000; ++i) deep += "]";
  for (int i = 0; i < 59999; ++i) deep += "a";
  check(accepts("pickle", deep + "."), "60,000 nested lists are no danger");
  std::string cyclic = "\x80\x04]q";
  cyclic += '\0';
  cyclic += "h";
  cyclic += '\0';
  check(accepts("pickle", cyclic + "a."), "a list that holds itself is no danger");
}

}  // namespace

int main() {
  test_targets();
  test_every_cut();
  test_zip_tricks();
  test_depth();
  return finish();
}
