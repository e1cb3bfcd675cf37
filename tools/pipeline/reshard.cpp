#include "container/open.h"
#include "io/text.h"
#include "pipeline/commands.h"

namespace lowbit::ckpt {

Result<Json> reshard(const std::string& source, const std::string& target,
                     const ReshardOptions& options) {
  LB_TRY(document, open_checkpoint(source));
  LB_TRY(report, write_dcp(document, target, options.write));
  return Json{{"source", printable(source)},
              {"target", printable(target)},
              {"ranks", options.write.mesh.ranks()},
              {"tensors", report.tensors},
              {"values", report.values},
              {"chunks", report.chunks},
              {"copied", report.copied},
              {"bytes", report.bytes}};
}

}  // namespace lowbit::ckpt
