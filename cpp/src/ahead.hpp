// Work that several threads do ahead of its turn; deploy/feed/parallel.py.
//
//   0 1 2 3 ... --> thread 0:  work(0)        work(3) ...     in any order
//                   thread 1:      work(1)  work(2) ...
//                   take()  take()  take() ...                in order
//
// What a work threw is thrown when its result is taken, so that the first in order is met first.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace calib8 {

template <class T>
class Ahead {
 public:
  using Work = std::function<T(std::size_t)>;

  // Of 0 to `count` - 1; one thread is the caller's own, which works as it takes.
  Ahead(Work work, std::size_t count, std::size_t threads)
      : work_(std::move(work)), count_(count), slots_(2 * std::min(threads, count)) {
    const std::size_t wanted = slots_.size() / 2;
    if (wanted > 1) start(wanted);
  }

  Ahead(const Ahead&) = delete;
  Ahead& operator=(const Ahead&) = delete;

  // Waits for the work that has begun.
  ~Ahead() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    moved_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // The next result; `count` times, by one thread. Throws what its work threw.
  T take() {
    if (threads_.empty()) return work_(taken_++);
    Result result = next();
    if (result.error) std::rethrow_exception(std::move(result.error));
    return std::move(*result.made);
  }

 private:
  // Of a work that is not done neither.
  struct Result {
    std::optional<T> made;
    std::exception_ptr error;
  };

  void start(std::size_t wanted) {
    threads_.reserve(wanted);
    try {
      while (threads_.size() < wanted) threads_.emplace_back([this] { run(); });
    } catch (const std::exception&) {  // the system has no more of them: those that run suffice
    }
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      moved_.wait(lock, [this] { return over() || drawn_ < taken_ + slots_.size(); });
      if (over()) return;
      const std::size_t index = drawn_++;
      lock.unlock();
      Result result = worked(index);
      lock.lock();
      slots_[index % slots_.size()] = std::move(result);
      moved_.notify_all();
    }
  }

  bool over() const { return stop_ || drawn_ == count_; }

  Result worked(std::size_t index) {
    try {
      return {work_(index), nullptr};
    } catch (...) {
      return {std::nullopt, std::current_exception()};
    }
  }

  Result next() {
    std::unique_lock lock(mutex_);
    Result& slot = slots_[taken_ % slots_.size()];
    moved_.wait(lock, [&slot] { return slot.made || slot.error; });
    Result result = std::exchange(slot, Result());
    ++taken_;
    moved_.notify_all();
    return result;
  }

  Work work_;
  std::size_t count_;
  std::mutex mutex_;
  std::condition_variable moved_;
  std::vector<Result> slots_;  // a ring: all that is worked on or waits to be taken
  std::size_t drawn_ = 0;
  std::size_t taken_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace calib8
