#include "python/work.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "dialect/numbers/plain_arithmetic.h"

namespace lowbit::ckpt::python {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kBetween(100);

/// What the two threads share.
struct Desk {
  std::mutex lock;
  std::condition_variable changed;
  std::optional<std::pair<uint64_t, uint64_t>> question;  // bytes done and in all
  bool stop = false, finished = false;
  // The working thread's own:
  Clock::time_point asked{};
  bool ended = false;

  /// The work's progress function. Commands call it from one thread at a time.
  bool progress(uint64_t done, uint64_t total) {
    const Clock::time_point now = Clock::now();
    const bool end = done >= total && !ended;
    std::unique_lock guard(lock);
    if (stop) return false;
    if (!end && now - asked < kBetween) return true;
    ended = ended || end;
    asked = now;
    question = {done, total};
    changed.notify_all();
    changed.wait(guard, [this] { return !question; });
    return !stop;
  }
};

}  // namespace

void run(PyObject* callback, const std::function<Status(const Progress&)>& work) {
  Desk desk;
  Status done = fine();
  bool raised = false;  // in this thread, which runs nothing of Python's any more
  std::thread worker([&] {
    Status result = fine();
    try {
      result = with_plain_arithmetic(
          [&] { return work([&desk](uint64_t d, uint64_t t) { return desk.progress(d, t); }); });
    } catch (const std::bad_alloc&) {
      result = failed("not enough memory");
    } catch (const std::exception& error) {
      result = failed(error.what());
    }
    const std::lock_guard guard(desk.lock);
    done = std::move(result);
    desk.finished = true;
    desk.changed.notify_all();
  });
  const auto answer = [&](std::optional<std::pair<uint64_t, uint64_t>> question) {
    if (raised) return false;
    try {
      check(call_python(PyErr_CheckSignals));
      if (!question || callback == Py_None) return true;
      const Object said(call_python([&] {
        return PyObject_CallFunction(callback, "KK", question->first, question->second);
      }));
      const int go_on = said.get() == Py_None ? 1 : PyObject_IsTrue(said.get());
      if (go_on < 0) throw Raised();
      return go_on == 1;
    } catch (const Raised&) {
      raised = true;
      return false;
    }
  };
  for (bool finished = false; !finished;) {
    std::optional<std::pair<uint64_t, uint64_t>> question;
    {
      const Released released;
      std::unique_lock guard(desk.lock);
      desk.changed.wait_for(guard, kBetween, [&] { return desk.finished || desk.question; });
      question = desk.question;
      finished = desk.finished;
    }
    const bool go_on = answer(question);
    {
      const Released released;
      const std::lock_guard guard(desk.lock);
      if (!go_on) desk.stop = true;
      if (question) desk.question.reset();
      desk.changed.notify_all();
    }
  }
  {
    const Released released;
    worker.join();
  }
  if (raised) throw Raised();
  if (!done.ok()) raise(done.error());
}

}  // namespace lowbit::ckpt::python
