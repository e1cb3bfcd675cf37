// A list of types. The position of a type is its index.
#pragma once

namespace lowbit {

template <class... T>
struct Types {
  static constexpr int kCount = sizeof...(T);
};

}  // namespace lowbit
