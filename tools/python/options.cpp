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
  /// The fields of several keys.
  template <class T, class... More>
  void take(const char* key, T& out, const char* next, More&... more) {
    take(key, out);
    take(next, more...);
  }
  void take(Selection& out) { take("include", out.include, "exclude", out.exclude); }
  void take(WriteOptions& out) {
    take("replace", out.replace, "manifest", out.manifest, "file_number", out.file_number);
    take("published_as", out.published_as, "threads", out.threads, "memory", out.memory);
    take("parts", out.mesh.parts, "dims", out.mesh.dims);
    std::vector<uint64_t> part;
    take("part", part);
    if (part.size() == 2) out.part = Part{part[0], part[1]};
  }
  void take(Wanted& out) {
    take("state_format", out.state_format, "block", out.block, "keep", out.keep);
    take("lossy", out.lossy, "full_precision", out.full_precision);
  }
  void take(InspectOptions& out) {
    take(out.select);
    take("health", out.health, "digest", out.digest);
  }
  void take(VerifyOptions& out) {
    take(out.select);
    take("finite", out.finite, "opaque", out.opaque, "threads", out.threads);
  }
  void take(ConvertOptions& out) {
    take("to", out.to, "from", out.from, "optimizer", out.optimizer, "members", out.members);
    take("container", out.container, "dry_run", out.dry_run, "weights", out.weights);
    take("seed", out.seed);
    take(out.wanted);
    take(out.select);
    take(out.write);
  }
  void take(ReshardOptions& out) {
    take("dry_run", out.dry_run, "requantize", out.requantize);
    take(out.select);
    take(out.write);
  }
  void take(DiffOptions& out) {
    take(out.select);
    take("bytes", out.bytes, "tolerance", out.tolerance);
  }
  /// After the last.
  void end() const {
    if (!rest_.empty()) raise(PyExc_TypeError, "there is no option " + rest_.begin().key());
  }

 private:
  Json rest_;
};

}  // namespace

template <class Options>
Options options_of(const std::string& json) {
  Fields fields(json);
  Options out;
  fields.take(out);
  fields.end();
  return out;
}
template InspectOptions options_of(const std::string&);
template VerifyOptions options_of(const std::string&);
template ConvertOptions options_of(const std::string&);
template ReshardOptions options_of(const std::string&);
template DiffOptions options_of(const std::string&);

}  // namespace lowbit::ckpt::python
