// The queue between threads: bounded, in order, and quiet until there is something to do.
#include "engine/bounded_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

namespace gradcast {
namespace {

using Queue = BoundedQueue<int>;
constexpr size_t kNone = std::numeric_limits<size_t>::max();

TEST(BoundedQueue, AnItemThatFindsNoPlaceIsRefusedAndTheConsumerSeesIt) {
  Queue queue(2);
  EXPECT_TRUE(queue.push(1, Queue::Wake::kCounted));
  EXPECT_TRUE(queue.push(2, Queue::Wake::kCounted));
  EXPECT_FALSE(queue.push(3, Queue::Wake::kCounted));
  std::vector<int> items;
  // Comes back at once, although two counted items alone would not wake it.
  EXPECT_TRUE(queue.pop_all(items, kNone, kNever).overflowed);
  EXPECT_EQ(items, std::vector<int>({1, 2}));
  EXPECT_TRUE(queue.push(4, Queue::Wake::kAtOnce));
  EXPECT_TRUE(queue.pop_all(items, kNone, kNever).overflowed) << "an overflow is remembered";
}

TEST(BoundedQueue, AnItemMaySayHowManyMoreAreEnough) {
  Queue queue(8);
  std::vector<int> items;
  EXPECT_TRUE(queue.push(1, Queue::Wake::kCounted, 2));
  std::thread consumer([&] { queue.pop_all(items, kNone, kNever); });
  EXPECT_TRUE(queue.push(2, Queue::Wake::kCounted));
  EXPECT_TRUE(queue.push(3, Queue::Wake::kCounted));
  consumer.join();
  EXPECT_EQ(items, std::vector<int>({1, 2, 3}));
  EXPECT_TRUE(queue.push(4, Queue::Wake::kCounted));
  queue.pop_all(items, kNone, 0);
  EXPECT_EQ(items, std::vector<int>({4})) << "no longer";
  EXPECT_TRUE(queue.push(5, Queue::Wake::kCounted, 0));
  queue.pop_all(items, kNone, kNever);
  EXPECT_EQ(items, std::vector<int>({5}));
}

TEST(BoundedQueue, ARaisedCapacityHoldsMore) {
  Queue queue(1);
  queue.raise_capacity(3);
  queue.raise_capacity(2);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(queue.push(i, Queue::Wake::kCounted));
  }
  EXPECT_FALSE(queue.push(3, Queue::Wake::kCounted));
}

TEST(BoundedQueue, CountedItemsWakeWhenThereAreEnough) {
  Queue queue(8);
  std::atomic<bool> woken = false;
  std::vector<int> items = {7};  // replaced by what comes
  std::thread consumer([&] {
    queue.pop_all(items, 3, kNever);
    woken = true;
  });
  EXPECT_TRUE(queue.push(1, Queue::Wake::kCounted));
  EXPECT_TRUE(queue.push(2, Queue::Wake::kCounted));
  // A consumer that would wake too early would do so within this time on any but the slowest day.
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(woken);
  EXPECT_TRUE(queue.push(3, Queue::Wake::kCounted));
  consumer.join();
  EXPECT_EQ(items, std::vector<int>({1, 2, 3}));
}

TEST(BoundedQueue, AnUrgentItemAndTheEndWakeAtOnce) {
  Queue queue(1);
  std::vector<int> items;
  std::thread consumer([&] { EXPECT_FALSE(queue.pop_all(items, kNone, kNever).closed); });
  EXPECT_TRUE(queue.push(1, Queue::Wake::kAtOnce));
  consumer.join();
  EXPECT_EQ(items, std::vector<int>({1}));
  EXPECT_TRUE(queue.push(2, Queue::Wake::kCounted));
  queue.close();  // through a full queue
  EXPECT_TRUE(queue.pop_all(items, kNone, kNever).closed);
}

TEST(BoundedQueue, ComesBackAtTheDeadlineWithWhatThereIs) {
  Queue queue(4);
  EXPECT_TRUE(queue.push(5, Queue::Wake::kCounted));
  std::vector<int> items;
  const int64_t deadline_ns = steady_now_ns() + 5'000'000;
  queue.pop_all(items, 2, deadline_ns);
  EXPECT_GE(steady_now_ns(), deadline_ns);
  EXPECT_EQ(items, std::vector<int>({5}));
}

TEST(BoundedQueue, LosesNothingBetweenManyProducers) {
  constexpr int kProducers = 4;
  constexpr int kItems = 2000;
  Queue queue(kProducers * kItems);
  std::vector<std::thread> producers;
  for (int producer = 0; producer < kProducers; ++producer) {
    producers.emplace_back([&, producer] {
      for (int i = 0; i < kItems; ++i) {
        EXPECT_TRUE(queue.push(producer * kItems + i, i % 7 == 0 ? Queue::Wake::kAtOnce : Queue::Wake::kCounted));
      }
    });
  }
  std::vector<int> last(kProducers, -1);
  std::vector<int> items;
  int count = 0;
  while (count < kProducers * kItems) {
    queue.pop_all(items, 1, steady_now_ns() + 20'000'000'000);
    ASSERT_FALSE(items.empty());
    for (const int item : items) {
      EXPECT_GT(item % kItems, last[item / kItems]) << "out of order";
      last[item / kItems] = item % kItems;
      ++count;
    }
  }
  for (std::thread& producer : producers) {
    producer.join();
  }
}

}  // namespace
}  // namespace gradcast
