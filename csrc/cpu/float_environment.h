// What arithmetic means on this thread: rounding to nearest, and denormal numbers as they are.
#pragma once

namespace lowbit::cpu {

/// The default floating-point environment until the object ends, then the caller's. A caller may
/// flush denormal numbers (torch.set_flush_denormal, or a library that was built with -ffast-math)
/// or round otherwise, on this thread and not on others of the pool: bits would then depend on the
/// thread, and float16 values below 2^-14 would be zeros. Costs nothing where nothing was changed
/// but one read of a register.
class FloatEnvironment {
 public:
  FloatEnvironment();
  ~FloatEnvironment();
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  unsigned long long was_;
};

}  // namespace lowbit::cpu
