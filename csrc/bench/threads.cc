#include <barrier>
#include <exception>
#include <thread>
#include <utility>

#include "bench/group.h"
#include "gradcast/error.h"
#include "platform/sync.h"

namespace gradcast {
namespace {

// State that the threads share.
struct Meeting {
  Meeting(int32_t world_size, const InprocCost& network)
      : cost(network), all(world_size), texts(static_cast<size_t>(world_size)) {}

  const InprocCost cost;

  // Waits for all ranks. Throws Error{kCommunication} once one has failed, since what it should have brought is
  // missing.
  void meet() GC_EXCLUDES(mutex) {
    all.arrive_and_wait();
    MutexLock lock(mutex);
    if (failure) {
      throw Error(ErrorCode::kCommunication, "another rank has failed");
    }
  }

  // To be called in a handler. The others do not wait for this rank any more.
  void leave() GC_EXCLUDES(mutex) {
    {
      MutexLock lock(mutex);
      failure = failure ? failure : std::current_exception();
    }
    all.arrive_and_drop();
  }

  std::exception_ptr first_failure() GC_EXCLUDES(mutex) {
    MutexLock lock(mutex);
    return failure;
  }

  std::barrier<> all;
  // Each rank writes its own place between two meetings; all read between the next two.
  std::vector<std::string> texts;
  std::shared_ptr<InprocWorld> world;

  Mutex mutex;
  std::exception_ptr failure GC_GUARDED_BY(mutex);  // the first one
};

class ThreadGroup final : public Group {
 public:
  ThreadGroup(Meeting& meeting, int32_t rank) : meeting_(meeting), rank_(rank) {}

  int32_t rank() const override { return rank_; }
  int32_t world_size() const override { return static_cast<int32_t>(meeting_.texts.size()); }

  std::unique_ptr<Transport> make_transport(std::vector<HostBuffer> buffers) override {
    if (rank_ == 0) {
      meeting_.world = std::make_shared<InprocWorld>(world_size(), meeting_.cost);
    }
    meeting_.meet();
    std::unique_ptr<Transport> transport = meeting_.world->transport(rank_, std::move(buffers));
    meeting_.meet();
    return transport;
  }

  std::vector<std::string> gather_texts(const std::string& own) override {
    meeting_.texts[rank_] = own;
    meeting_.meet();
    std::vector<std::string> texts = meeting_.texts;
    meeting_.meet();
    return texts;
  }

 private:
  Meeting& meeting_;
  const int32_t rank_;
};

}  // namespace

void run_as_threads(int32_t world_size, const InprocCost& cost, const std::function<void(Group&)>& action) {
  Meeting meeting(world_size, cost);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        ThreadGroup group(meeting, rank);
        action(group);
      } catch (...) {
        meeting.leave();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  if (const std::exception_ptr failure = meeting.first_failure()) {
    std::rethrow_exception(failure);
  }
}

}  // namespace gradcast
