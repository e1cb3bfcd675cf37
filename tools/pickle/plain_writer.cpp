#include <algorithm>
#include <charconv>

#include "pickle/numpy_value.h"
#include "pickle/plain.h"

namespace lowbit::ckpt {

void write_items(PickleWriter& to, size_t count, const std::function<void(size_t)>& item) {
  constexpr size_t kBatch = 1000;
  if (count == 1) {
    item(0);
    to.append();
    return;
  }
  for (size_t i = 0; i < count;) {
    to.mark();
    for (const size_t end = std::min(count, i + kBatch); i < end; ++i) item(i);
    to.appends();
  }
}

void write_entries(PickleWriter& to, size_t count, bool ordered,
                   const std::function<void(size_t)>& entry) {
  constexpr size_t kBatch = 1000;
  if (count == 1) {
    entry(0);
    to.set_item();
    return;
  }
  for (size_t i = 0; i < count;) {
    // In an OrderedDict, Python's pickler looks one item ahead, so it sets a single last entry
    // alone.
    const bool alone = ordered && i + 1 == count;
    const size_t end = std::min(count, i + kBatch);
    const bool full = end - i == kBatch;
    if (!alone) to.mark();
    for (; i < end; ++i) entry(i);
    if (alone) {
      to.set_item();
    } else {
      to.set_items();
    }
    // In a dict it learns that it is at the end only when it asks for more.
    if (!ordered && full && i == count) to.mark().set_items();
  }
}

void write_value(PickleWriter& to, const Value& v) {
  const auto size = v.items.size();
  const auto tuple = [&] {
    if (size > 3) to.mark();
    for (const Value& item : v.items) write_value(to, item);
    to.tuple(size);
    if (size > 0) to.put();
  };
  switch (v.kind) {
    case Value::Kind::kNone:
      to.none();
      return;
    case Value::Kind::kBool:
      to.boolean(v.integer != 0);
      return;
    case Value::Kind::kInt:
      to.integer(v.integer);
      return;
    case Value::Kind::kFloat:
      to.floating(v.real);
      return;
    case Value::Kind::kText:
      to.text(v.text);
      return;
    case Value::Kind::kBytes:
      to.bytes(v.text);
      return;
    case Value::Kind::kList:
      to.empty_list().put();
      write_items(to, size, [&](size_t i) { write_value(to, v.items[i]); });
      return;
    case Value::Kind::kTuple:
      tuple();
      return;
    case Value::Kind::kOrdered:
    case Value::Kind::kDict: {
      const bool ordered = v.kind == Value::Kind::kOrdered, counter = v.text == Value::kCounter;
      if (counter) to.global("collections", "Counter");
      if (ordered) {
        to.global("collections", "OrderedDict").tuple(0).call().put();
      } else if (!v.text.empty() && !counter) {
        to.global("yacs.config", "CfgNode").object().put();
      } else {
        to.empty_dict().put();
      }
      write_entries(to, size / 2, ordered, [&](size_t i) {
        write_value(to, v.items[2 * i]);
        write_value(to, v.items[2 * i + 1]);
      });
      if (counter) to.tuple(1).put().call().put();
      if (!ordered && !counter && !v.text.empty()) {
        // What yacs keeps beside the entries; a node without it cannot be merged or frozen.
        to.empty_dict().put().mark();
        to.text("__immutable__").boolean(false);
        to.text("__deprecated_keys__")
            .global("__builtin__", "set")
            .empty_list()
            .put()
            .tuple(1)
            .put()
            .call()
            .put();
        to.text("__renamed_keys__").empty_dict().put();
        to.text("__new_allowed__").boolean(false);
        to.set_items().build();
      }
      return;
    }
    case Value::Kind::kSet:
      to.global("__builtin__", "set").empty_list().put();
      write_items(to, size, [&](size_t i) { write_value(to, v.items[i]); });
      to.tuple(1).put().call().put();
      return;
    case Value::Kind::kComplex:
      to.global("__builtin__", "complex");
      tuple();
      to.call().put();
      return;
    case Value::Kind::kBytearray:
      to.bytearray(v.text);
      return;
    case Value::Kind::kLong:
      to.long_integer(v.text);
      return;
    case Value::Kind::kOpaque:  // writers refuse any other before
      if (v.integer == Value::kArray) return write_array(to, v);
      if (v.integer == Value::kMade) {
        const size_t dot = v.text.rfind('.');
        to.global(v.text.substr(0, dot), v.text.substr(dot + 1)).object().put();
        write_value(to, v.items[0]);
        to.build();
        return;
      }
      to.none();
      return;
    case Value::Kind::kGlobal: {
      const size_t space = v.text.find(' ');
      if (is_layout(v.text.substr(space + 1))) {
        to.global("torch.serialization", "_get_layout").text("torch." + v.text.substr(space + 1));
        to.tuple(1).put().call().put();
        return;
      }
      to.global(v.text.substr(0, space), v.text.substr(space + 1));
      return;
    }
    case Value::Kind::kDevice: {
      const size_t colon = v.text.find(':');
      const char *end = v.text.data() + v.text.size(), *number = v.text.data() + colon + 1;
      int index = 0;
      const bool numbered = colon != std::string::npos && number < end &&
                            std::from_chars(number, end, index).ptr == end;
      to.global("torch", "device").text(numbered ? v.text.substr(0, colon) : v.text);
      if (numbered) to.integer(index);
      to.tuple(numbered ? 2 : 1).put().call().put();
      return;
    }
    case Value::Kind::kSize:
      to.global("torch", "Size");
      tuple();
      to.tuple(1).put().call().put();
      return;
  }
}

}  // namespace lowbit::ckpt
