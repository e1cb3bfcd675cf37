#include "python/work.h"

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

namespace py = pybind11;

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

void raise(const Error& error) {
  const py::object type = py::module_::import("lowbit.checkpoint").attr("CheckpointError");
  const auto text = [](const std::string& s) {
    return py::reinterpret_steal<py::object>(
        PyUnicode_DecodeUTF8(s.data(), static_cast<Py_ssize_t>(s.size()), "replace"));
  };
  const py::object made = type(text(error.text), static_cast<int>(error.code), text(error.file),
                               text(error.item), text(error.tensor));
  PyErr_SetObject(type.ptr(), made.ptr());
  throw py::error_already_set();
}

void run(const py::object& callback, const std::function<Status(const Progress&)>& work) {
  Desk desk;
  Status done = fine();
  std::exception_ptr pending;  // of Python
  std::thread worker([&] {
    Status result = fine();
    try {
      result = work([&desk](uint64_t d, uint64_t t) { return desk.progress(d, t); });
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
    if (pending) return false;
    try {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      if (!question || callback.is_none()) return true;
      const py::object said = callback(question->first, question->second);
      return said.is_none() || said.cast<bool>();
    } catch (...) {
      pending = std::current_exception();
      return false;
    }
  };
  for (bool finished = false; !finished;) {
    std::optional<std::pair<uint64_t, uint64_t>> question;
    {
      const py::gil_scoped_release released;
      std::unique_lock guard(desk.lock);
      desk.changed.wait_for(guard, kBetween, [&] { return desk.finished || desk.question; });
      question = desk.question;
      finished = desk.finished;
    }
    const bool go_on = answer(question);
    {
      const py::gil_scoped_release released;
      const std::lock_guard guard(desk.lock);
      if (!go_on) desk.stop = true;
      if (question) desk.question.reset();
      desk.changed.notify_all();
    }
  }
  {
    const py::gil_scoped_release released;
    worker.join();
  }
  if (pending) std::rethrow_exception(pending);
  if (!done.ok()) raise(done.error());
}

}  // namespace lowbit::ckpt::python
