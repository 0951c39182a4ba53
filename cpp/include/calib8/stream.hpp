// A bounded background stream: one thread produces, any number of threads consume.
//
//   producer thread --put--> [ bounded queue ] --next--> worker, worker, ...
//
// The order is the producer's. An exception of the producer is thrown in one consumer. The destructor
// stops and joins the thread.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "calib8/export.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8 {

template <class T>
class Stream {
 public:
  // Puts one item into the queue. Returns false when the stream is being closed.
  using Put = std::function<bool(T)>;

  explicit Stream(std::function<void(const Put&)> produce, std::size_t depth = 4)
      : depth_(depth > 0 ? depth : 1),
        thread_([this, produce = std::move(produce)] { run(produce); }) {}

  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  ~Stream() { close(); }

  // The next item, or nothing at the end. Throws what the producer threw, once.
  std::optional<T> next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !queue_.empty() || done_ || stop_; });
    if (!queue_.empty() && !stop_) {
      std::optional<T> item(std::move(queue_.front()));
      queue_.pop_front();
      changed_.notify_all();
      return item;
    }
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    return std::nullopt;
  }

  // Stops the producer and joins its thread; safe to call twice.
  void close() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
      error_ = nullptr;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void run(const std::function<void(const Put&)>& produce) {
    std::exception_ptr error;
    try {
      produce([this](T item) { return put(std::move(item)); });
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    done_ = true;
    if (!stop_) error_ = std::move(error);
    changed_.notify_all();
  }

  bool put(T item) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return queue_.size() < depth_ || stop_; });
    if (stop_) return false;
    queue_.push_back(std::move(item));
    changed_.notify_all();
    return true;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<T> queue_;
  std::exception_ptr error_;
  std::size_t depth_;
  bool done_ = false;
  bool stop_ = false;
  std::thread thread_;  // the last member: it starts after all others are initialised
};

}  // namespace calib8
CALIB8_EXPORT_END
