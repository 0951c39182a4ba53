#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>

#include "catch.hpp"
#include "machine.hpp"
#include "prefetch.hpp"

using calib8::Prefetcher;

namespace {

// Until it holds, at most ten seconds.
template <class Holds>
bool eventually(const Holds& holds) {
  for (int k = 0; k < 10000; ++k) {
    if (holds()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

}  // namespace

TEST_CASE("what several threads make is taken in order, round after round") {
  for (const std::size_t threads : {1U, 2U, 5U, 16U}) {
    for (std::size_t count = 0; count < 60; ++count) {
      std::atomic<std::size_t> made{0};
      {
        const auto work = [&made](std::size_t index) {
          if (index % 7 == 0) std::this_thread::yield();
          ++made;
          return std::to_string(index);
        };
        Prefetcher<std::string> prefetcher(work, count, threads);
        for (std::size_t k = 0; k < count; ++k) REQUIRE(prefetcher.take() == std::to_string(k));
      }
      REQUIRE(made == count);
    }
  }
}

TEST_CASE("work is done by as many threads as were asked for, beside each other") {
  std::atomic<int> inside{0};
  Prefetcher<bool> prefetcher(
      [&inside](std::size_t) {
        ++inside;
        return eventually([&inside] { return inside >= 3; });
      },
      3, 3);
  for (int k = 0; k < 3; ++k) CHECK(prefetcher.take());
}

TEST_CASE("the first error in order is met first, and later ones wait for their turn") {
  for (int round = 0; round < 50; ++round) {
    std::atomic<bool> failed{false};
    Prefetcher<int> prefetcher(
        [&failed](std::size_t index) {
          if (index == 3) {
            failed = true;
            throw std::runtime_error("3");
          }
          if (index == 2) {  // in any case after the third
            eventually([&failed] { return failed.load(); });
            throw std::logic_error("2");
          }
          return static_cast<int>(index);
        },
        8, 4);
    CHECK(prefetcher.take() == 0);
    CHECK(prefetcher.take() == 1);
    CHECK_THROWS_WITH(prefetcher.take(), "2");
    CHECK_THROWS_WITH(prefetcher.take(), "3");
    for (int k = 4; k < 8; ++k) CHECK(prefetcher.take() == k);
  }
}

TEST_CASE("two results a thread are made ahead and no more, and leaving early ends the threads") {
  std::atomic<std::size_t> made{0};
  {
    Prefetcher<std::size_t> prefetcher([&made](std::size_t) { return ++made; }, 1000000, 3);
    REQUIRE(eventually([&made] { return made == 6; }));
    for (int k = 0; k < 4; ++k) prefetcher.take();
    REQUIRE(eventually([&made] { return made == 10; }));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  CHECK(made == 10);
  for (int round = 0; round < 200; ++round) {
    const Prefetcher<std::size_t> left([&made](std::size_t) { return ++made; }, 1000000, 4);
  }
  CHECK(made <= 10 + 200 * 8);
}

TEST_CASE("one thread works as it is asked to") {
  std::size_t made = 0;  // by this thread alone
  Prefetcher<std::size_t> prefetcher([&made](std::size_t) { return ++made; }, 10, 1);
  CHECK(prefetcher.take() == 1);
  CHECK(made == 1);
}

#ifdef __linux__
TEST_CASE("unless told, there is one thread a core that may be used, and at most four") {
  cpu_set_t before;
  REQUIRE(::sched_getaffinity(0, sizeof before, &before) == 0);
  CHECK(calib8::default_threads() == std::min(4, CPU_COUNT(&before)));
  int core = 0;
  while (!CPU_ISSET(core, &before)) ++core;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  REQUIRE(::sched_setaffinity(0, sizeof one, &one) == 0);
  CHECK(calib8::default_threads() == 1);
  REQUIRE(::sched_setaffinity(0, sizeof before, &before) == 0);
}
#endif
