#include "python/options.h"

#include <limits>
#include <vector>

#include "python/errors.h"

namespace lowbit::ckpt::python {
namespace {

// Each stores a value where it is one of its type.

bool store(const Json& value, bool& out) {
  if (value.is_boolean()) out = value.get<bool>();
  return value.is_boolean();
}

bool store(const Json& value, std::string& out) {
  if (value.is_string()) out = value.get<std::string>();
  return value.is_string();
}

bool store(const Json& value, double& out) {
  if (value.is_number()) out = value.get<double>();
  return value.is_number();
}

bool store(const Json& value, uint64_t& out) {
  if (value.is_number_unsigned()) out = value.get<uint64_t>();
  return value.is_number_unsigned();
}

bool store(const Json& value, int64_t& out) {
  const bool large = value.is_number_unsigned() &&
                     value.get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()};
  if (!value.is_number_integer() || large) return false;
  out = value.get<int64_t>();
  return true;
}

bool store(const Json& value, int& out) {
  int64_t wide = 0;
  if (!store(value, wide) || wide != static_cast<int>(wide)) return false;
  out = static_cast<int>(wide);
  return true;
}

template <class T>
bool store(const Json& value, std::vector<T>& out) {
  if (!value.is_array()) return false;
  out.clear();
  for (const Json& item : value) {
    if (!store(item, out.emplace_back())) return false;
  }
  return true;
}

const char* type_name(const bool&) { return "True or False"; }
const char* type_name(const std::string&) { return "text"; }
const char* type_name(const double&) { return "a number"; }
const char* type_name(const uint64_t&) { return "a whole number from 0 to 2^64 - 1"; }
const char* type_name(const int64_t&) { return "a whole number"; }
const char* type_name(const int&) { return "a whole number of 32 bits"; }
const char* type_name(const std::vector<std::string>&) { return "a list of text"; }
template <class T>
const char* type_name(const std::vector<T>&) {
  return "a list of whole numbers";
}

/// The fields of a JSON object, taken one by one.
class Fields {
 public:
  explicit Fields(const std::string& json) : rest_(Json::parse(json, nullptr, false)) {
    if (!rest_.is_object()) raise(PyExc_TypeError, "options are one JSON object, not " + json);
  }
  template <class T>
  void take(const char* key, T& out) {
    const auto found = rest_.find(key);
    if (found == rest_.end()) return;
    if (!store(*found, out))
      raise(PyExc_TypeError,
            std::string(key) + " must be " + type_name(out) + ", not " + found->dump());
    rest_.erase(found);
  }
  void take(Selection& out) {
    take("include", out.include);
    take("exclude", out.exclude);
  }
  void take(WriteOptions& out) {
    take("replace", out.replace);
    take("manifest", out.manifest);
    take("file_number", out.file_number);
    take("published_as", out.published_as);
    take("threads", out.threads);
    take("memory", out.memory);
    take("parts", out.mesh.parts);
    take("dims", out.mesh.dims);
    std::vector<uint64_t> part;
    take("part", part);
    if (part.size() == 2) out.part = Part{part[0], part[1]};
  }
  void take(Wanted& out) {
    take("state_format", out.state_format);
    take("block", out.block);
    take("keep", out.keep);
    take("lossy", out.lossy);
    take("full_precision", out.full_precision);
  }
  /// After the last.
  void end() const {
    if (!rest_.empty()) raise(PyExc_TypeError, "there is no option " + rest_.begin().key());
  }

 private:
  Json rest_;
};

}  // namespace

InspectOptions inspect_options(const std::string& json) {
  Fields fields(json);
  InspectOptions out;
  fields.take(out.select);
  fields.take("health", out.health);
  fields.take("digest", out.digest);
  fields.end();
  return out;
}

VerifyOptions verify_options(const std::string& json) {
  Fields fields(json);
  VerifyOptions out;
  fields.take(out.select);
  fields.take("finite", out.finite);
  fields.take("opaque", out.opaque);
  fields.take("threads", out.threads);
  fields.end();
  return out;
}

ConvertOptions convert_options(const std::string& json) {
  Fields fields(json);
  ConvertOptions out;
  fields.take("to", out.to);
  fields.take("from", out.from);
  fields.take("optimizer", out.optimizer);
  fields.take("members", out.members);
  fields.take("container", out.container);
  fields.take(out.wanted);
  fields.take(out.select);
  fields.take("dry_run", out.dry_run);
  fields.take("weights", out.weights);
  fields.take("seed", out.seed);
  fields.take(out.write);
  fields.end();
  return out;
}

ReshardOptions reshard_options(const std::string& json) {
  Fields fields(json);
  ReshardOptions out;
  fields.take(out.select);
  fields.take("dry_run", out.dry_run);
  fields.take("requantize", out.requantize);
  fields.take(out.write);
  fields.end();
  return out;
}

DiffOptions diff_options(const std::string& json) {
  Fields fields(json);
  DiffOptions out;
  fields.take(out.select);
  fields.take("bytes", out.bytes);
  fields.take("tolerance", out.tolerance);
  fields.end();
  return out;
}

}  // namespace lowbit::ckpt::python
