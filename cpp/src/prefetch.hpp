// Results that several threads compute before they are needed; deploy/feed/parallel.py.
//
//   0 1 2 3 ... --> thread 0:  work(0)        work(3) ...     in any order
//                   thread 1:      work(1)  work(2) ...
//                   take()  take()  take() ...                in order
//
// An exception of the work is thrown when its result is taken, so that errors come in order as well.
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
class Prefetcher {
 public:
  using Work = std::function<T(std::size_t)>;

  // Calls work(0) to work(count - 1). With one thread no thread is started: take() does the work.
  Prefetcher(Work work, std::size_t count, std::size_t threads)
      : work_(std::move(work)), count_(count), slots_(2 * std::min(threads, count)) {
    const std::size_t thread_count = slots_.size() / 2;
    if (thread_count > 1) start(thread_count);
  }

  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // Waits for the work that has begun.
  ~Prefetcher() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // The next result, at most `count` times and by one thread. Throws what its work threw.
  T take() {
    if (threads_.empty()) return work_(taken_count_++);
    Result result = next();
    if (result.error) std::rethrow_exception(std::move(result.error));
    return std::move(*result.value);
  }

 private:
  // Holds neither while the work is not done.
  struct Result {
    std::optional<T> value;
    std::exception_ptr error;
  };

  void start(std::size_t thread_count) {
    threads_.reserve(thread_count);
    try {
      while (threads_.size() < thread_count) threads_.emplace_back([this] { run(); });
    } catch (const std::exception&) {
      // The system has no more threads: those that run suffice.
    }
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock,
                    [this] { return is_done() || started_count_ < taken_count_ + slots_.size(); });
      if (is_done()) return;
      const std::size_t index = started_count_++;
      lock.unlock();
      Result result = compute(index);
      lock.lock();
      slots_[index % slots_.size()] = std::move(result);
      changed_.notify_all();
    }
  }

  bool is_done() const { return stop_ || started_count_ == count_; }

  Result compute(std::size_t index) {
    try {
      return {work_(index), nullptr};
    } catch (...) {
      return {std::nullopt, std::current_exception()};
    }
  }

  Result next() {
    std::unique_lock lock(mutex_);
    Result& slot = slots_[taken_count_ % slots_.size()];
    changed_.wait(lock, [&slot] { return slot.value || slot.error; });
    Result result = std::exchange(slot, Result());
    ++taken_count_;
    changed_.notify_all();
    return result;
  }

  Work work_;
  std::size_t count_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Result> slots_;  // a ring buffer of the results in work or not yet taken
  std::size_t started_count_ = 0;
  std::size_t taken_count_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace calib8
