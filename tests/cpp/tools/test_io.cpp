// Helpers of the checkpoint tool: combined CRCs, digests by every instruction set, globs, cuts of
// meshes, long writes, mapped windows, copies past the caches, files that
// are made.
#include <sys/utsname.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cstdlib>
#include <deque>
#include <numeric>
#include <random>
#include <string>

#include "check.h"
#include "container/dcp/cut.h"
#include "io/crc32.h"
#include "io/glob.h"
#include "io/hash.h"
#include "io/hash_kernels.h"
#include "io/read/mapped_file.h"
#include "io/read/open.h"
#include "io/stream_copy.h"
#include "io/write/new_directory.h"
#include "io/write/partial_name.h"
#include "io/write/write_run.h"

namespace {

using namespace lowbit::ckpt;

void test_temporary_names() {
  const std::string name = "out.pt", partial = "/a/.out.pt.partial-Xy12Zw";
  check(is_partial("/a/" + partial_name(name)) && is_partial(partial), "temporary names");
  check(!is_partial("/a/out.pt") && !is_partial("/a/out.pt.partial-Xy12Zw"), "other names");
  check(final_path(partial) == "/a/out.pt", "the final name of a file");
  check(final_path(".out.pt.partial-Xy12Zw") == "out.pt", "of one in the current folder");
  check(final_path(partial + "/__0_0.distcp") == "/a/out.pt/__0_0.distcp", "of a file in a folder");
  check(final_path(partial + "/x.partial-1") == "/a/out.pt/x.partial-1", "a file of the user's");
  check(final_path("/a.partial-1/out.pt") == "/a.partial-1/out.pt", "a folder of the user's");
}

void test_hashes() {
  check(Hash(kHashBaseline).hex() == "99aa06d3014798d86001c324468d497f", "XXH3-128 of nothing");
  std::mt19937_64 random(4);
  std::string bytes(100'000, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  for (const size_t size : {1ul, 16ul, 240ul, 241ul, 1024ul, 4097ul, 100'000ul}) {
    Hash whole(kHashBaseline), pieces(hash_kernels());
    whole.add(bytes.data(), size);
    for (size_t at = 0; at < size;) {
      const size_t n = std::min<size_t>(size - at, random() % 3000);
      pieces.add(bytes.data() + at, n);
      at += n;
    }
    check(pieces.hex() == whole.hex(), std::string("digests with ") + hash_kernels().isa);
  }
}

void test_joined_crcs() {
  std::mt19937_64 random(3);
  std::string bytes(100'000, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  const uint32_t whole = crc32(0, bytes.data(), bytes.size());
  check(crc32(0, "123456789", 9) == 0xcbf43926, "the CRC of zip");
  for (const size_t at : {0ul, 1ul, 2ul, 63ul, 64ul, 4096ul, 65537ul, 99'999ul, 100'000ul}) {
    const uint32_t a = crc32(0, bytes.data(), at),
                   b = crc32(0, bytes.data() + at, bytes.size() - at);
    check(crc32_joined(a, b, bytes.size() - at) == whole, "joined at " + std::to_string(at));
  }
  // Lengths beyond 32 bits: leading zeros do not change a CRC difference.
  const uint64_t large = 5ull << 32;
  const uint32_t once = crc32_joined(crc32_joined(1, 0, large), 0, large);
  check(once == crc32_joined(1, 0, 2 * large), "lengths add up");
}

void test_globs() {
  const struct {
    const char *pattern, *name;
    bool fits;
  } cases[] = {{"*", "", true},
               {"a*c", "abbbc", true},
               {"a*c", "abbbd", false},
               {"*.exp_avg", "optim.state.a.b.exp_avg", true},
               {"*.exp_avg", "optim.state.a.exp_avg_sq", false},
               {"layer?.w", "layer1.w", true},
               {"layer?.w", "layer12.w", false},
               {"[ab]x", "bx", true},
               {"[!ab]x", "bx", false},
               {"[!ab]x", "cx", true},
               {"[0-9][0-9]", "42", true},
               {"[]]", "]", true},
               {"[a", "[a", true},
               {"\\*", "*", false},
               {"\\*", "\\x", true},
               {"[^a]", "a", true},
               {"a", "", false},
               {"", "", true},
               {"**a**", "bab", true}};
  for (const auto& c : cases)
    check(glob_matches(c.pattern, c.name) == c.fits, std::string(c.pattern) + " on " + c.name);
  // Without backtracking; with it this would take years.
  std::string stars;
  for (int i = 0; i < 200; ++i) stars += "*a";
  check(!glob_matches(stars + "*b", std::string(5000, 'a')), "many stars");
}

void test_cuts() {
  const auto cuts = cut({7, 5}, {{2, 2}, {0, 1}});
  check(cuts.size() == 4 && cuts[3].rank == 3, "a grid");
  check(cuts[3].box.offset == Shape{4, 3} && cuts[3].box.shape == Shape{3, 2}, "its last corner");
  check(cut({3}, {{8}, {0}}).size() == 3, "ranks without rows are left out");
  check(cut({0, 4}, {{8}, {0}}).size() == 1, "an empty tensor keeps one box");
  check(cut({}, {{4}, {0}}).size() == 1 && cut({}, {{4}, {0}})[0].rank == 0, "a scalar");
  const auto twice = cut({7}, {{2, 2}, {0, 0}});
  check(twice.size() == 4 && twice[1].box.offset[0] == 2 && twice[2].box.offset[0] == 4 &&
            twice[3].box.shape[0] == 1,
        "a dimension that is cut twice");
  check(!check_mesh({{70000}, {0}}).ok() && !check_mesh({{2, 2}, {0}}).ok() &&
            !check_mesh({{1 << 16, 1 << 16}, {0, 1}}).ok(),
        "meshes without sense");
}

/// A folder of its own for a file, gone at the end.
struct Folder {
  std::string path = "test_io-XXXXXX";
  Folder() { check(::mkdtemp(path.data()) != nullptr, "a temporary folder"); }
  ~Folder() {
    ::unlink((path + "/f").c_str());
    ::rmdir(path.c_str());
  }
  std::shared_ptr<const File> file() const { return open_folder(path).value()->file("f").value(); }
  std::string content() const {
    std::string bytes(file()->size(), '\0');
    check(file()->read(0, bytes.data(), bytes.size()).ok(), "the file is read");
    return bytes;
  }
};

void test_runs_of_writes() {
  std::mt19937_64 random(5);
  for (const bool splits : {false, true}) {
    const Folder folder;
    WriteRun run(NewDirectory::part_of(folder.path, "f").value());
    std::string wanted;
    std::deque<std::string> held;  // pieces that are not copied live until the end
    const auto write = [&](uint64_t gap, uint64_t bytes) {
      wanted.resize(wanted.size() + gap, '\0');
      std::string& piece = held.emplace_back(bytes, '\0');
      for (char& c : piece) c = static_cast<char>(random());
      check(run.write(wanted.size(), piece.data(), piece.size()).ok(), "a write");
      wanted += piece;
      if (piece.size() <= WriteRun::kCopied) piece.assign(piece.size(), '#');
    };
    for (int i = 0; i < 300; ++i) {
      write(random() % 64, random() % 5000);
      if (splits && i % 50 == 0) write(64 + random() % 100'000, 1 + random() % 3'000'000);
    }
    // More small pieces than one call takes, and more of them than are kept at a time.
    for (int i = 0; i < 3000; ++i) write(i % 2, 1 + random() % 400);
    write(0, (2u << 20) - wanted.size() % (2u << 20));  // ends where a run does
    check(run.sync().ok() && folder.content() == wanted, "the bytes of all writes");
    // Behind what was written, and before it: no gap.
    write(0, 10);
    check(run.write(3, "abc", 3).ok() && run.flush().ok(), "a write before the others");
    wanted.replace(3, 3, "abc");
    check(folder.content() == wanted, "its bytes");
  }
}

void test_mapped_windows() {
  const Folder folder;
  const auto out = NewDirectory::part_of(folder.path, "f").value();
  std::string bytes((9u << 20) + 1234, '\0');
  std::mt19937_64 random(6);
  for (size_t i = 0; i < bytes.size(); i += 97) bytes[i] = static_cast<char>(random());
  check(out->write(0, bytes.data(), bytes.size()).ok(), "a file");
  MappedFiles files;
  const auto file = folder.file();
  const char* last = nullptr;
  for (int i = 0; i < 400; ++i) {
    auto one = files.take(file);
    const uint64_t at = random() % bytes.size();
    const uint64_t n =
        1 + random() % std::min<uint64_t>(bytes.size() - at, i % 10 ? 5000 : 6u << 20);
    const uint64_t end = at + n + random() % (bytes.size() - at - n + 1);
    last = one->at(at, n, end);
    if (last == nullptr) break;  // a file system, or a Linux, of which no page is mapped
    check(std::string_view(last, n) == std::string_view(bytes).substr(at, n), "bytes of a window");
    check(one->covers(at, n) && !one->covers(at, bytes.size()), "what the window has");
    check(one->at(at, n, end) == last, "what lies in the window is not mapped again");
    files.give_back(std::move(one));
  }
  struct statfs about{};
  struct utsname system{};
  check(::statfs(folder.path.c_str(), &about) == 0 && ::uname(&system) == 0, "the system tells");
  const bool local =
      about.f_type == 0xEF53 || about.f_type == 0x58465342 || about.f_type == 0x01021994;
  const bool recent = std::atof(system.release) >= 6;  // 5.14 tells too
  check(last != nullptr || !local || !recent, "pages of ext4, XFS and tmpfs are mapped");
  auto first = files.take(file);
  check(first->at(bytes.size() - 1, 2, bytes.size()) == nullptr, "no byte behind the end");
  check(files.take(folder.file())->file() != file, "another file's window is its own");
  // A window that was kept, of a file that became shorter: to touch it would be a signal.
  static_cast<void>(first->at(6u << 20, 1u << 20, bytes.size()));
  files.give_back(std::move(first));
  check(::truncate((folder.path + "/f").c_str(), 1u << 20) == 0, "the file is cut");
  first = files.take(file);
  check(!first->covers(6u << 20, 1), "its window is gone");
  const char* begin = first->at(0, 1000, 1u << 20);
  check(
      begin == nullptr || std::string_view(begin, 1000) == std::string_view(bytes).substr(0, 1000),
      "what is left");
  check(first->at(1u << 20, 1, 2u << 20) == nullptr, "no page behind the new end");
}

void test_copies_past_the_caches() {
  std::mt19937_64 random(7);
  std::string from(12u << 20, '\0');
  for (size_t i = 0; i < from.size(); i += 7) from[i] = static_cast<char>(random());
  for (const int threads : {1, 3}) {
    std::string to(from.size(), '#'), wanted = to;
    std::vector<MemoryCopy> copies;
    // Short and long ones, at any alignment, with bytes between them that stay.
    for (uint64_t at = random() % 64; at < from.size();) {
      const uint64_t most = copies.size() % 40 == 0 ? 5u << 20 : copies.size() % 3 ? 300 : 70'000;
      const uint64_t n = std::min<uint64_t>(random() % most, from.size() - at);
      const uint64_t source = random() % (from.size() - n);
      copies.push_back({to.data() + at, from.data() + source, n});
      wanted.replace(at, n, from, source, n);
      at += n + random() % 130;
    }
    check(stream_copy(copies, threads).ok() && to == wanted, "copied bytes, and no others");
  }
  check(stream_copy({}, 1).ok(), "no copies");
}

/// A file of that many bytes, none of which is read.
class Sized : public File {
 public:
  explicit Sized(uint64_t bytes) : File({.size = bytes}, "item") {}

 private:
  Status fetch(uint64_t, char*, uint64_t) const override { return fine(); }
};

/// Rows of a tensor that is cut along its columns take a part of each made file in turn.
void test_made_files() {
  const auto folder = Directory::local("/tmp");
  check(folder.ok(), "a folder opens");
  const auto turns = [&](size_t count, uint64_t bytes) {
    FileSet files(folder.value());
    size_t made = 0;
    for (size_t i = 0; i < count; ++i) {
      files.add_made("item", [&made, bytes]() -> Result<std::shared_ptr<File>> {
        ++made;
        return std::shared_ptr<File>(std::make_shared<Sized>(bytes));
      });
    }
    for (int turn = 0; turn < 3; ++turn) {
      for (uint32_t i = 0; i < count; ++i) check(files.open(i).ok(), "a made file opens");
    }
    return made;
  };
  check(turns(200, 1u << 20) == 200, "small files are made once");
  check(turns(30, 1ull << 32) == 30, "a few files are made once, whatever their size");
  check(turns(64, 1ull << 32) == 3 * 64, "large ones do not all stay");
  check(turns(300, 1) == 3 * 300, "there is a limit to their number");
}

}  // namespace

int main() {
  test_temporary_names();
  test_hashes();
  test_joined_crcs();
  test_globs();
  test_cuts();
  test_runs_of_writes();
  test_mapped_windows();
  test_copies_past_the_caches();
  test_made_files();
  return finish();
}
