// copy_ckpt SOURCE TARGET: writes the same document in the container of the target's name.
#include <cstdio>
#include <string>

#include "container/common/open.h"
#include "container/document/writer.h"

int main(int argc, char** argv) {
  using namespace lowbit::ckpt;
  if (argc != 3) return 2;
  const std::string target = argv[2];
  const auto document = open_checkpoint(argv[1]);
  ContainerKind kind = ContainerKind::kDcp;
  for (const char* suffix : {".pt", ".pth", ".bin"})
    kind = target.ends_with(suffix) ? ContainerKind::kTorch : kind;
  if (target.ends_with(".safetensors")) kind = ContainerKind::kSafetensors;
  const auto report = document.ok()
                          ? write_container(kind, document.value(), target, WriteOptions{})
                          : Result<WriteReport>(document.error());
  if (report.ok()) return 0;
  std::fprintf(stderr, "copy_ckpt: %s\n", report.error().text.c_str());
  return static_cast<int>(report.error().code);
}
