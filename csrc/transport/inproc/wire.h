// The wire of an in-process world: its one thread and what the ranks' transports share with it.
//
// Thread safety: any thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "gradcast/inproc.h"
#include "gradcast/transport.h"

namespace gradcast {

class InprocWorld::Wire {
 public:
  Wire(int32_t world_size, const InprocCost& cost);
  ~Wire();

  int32_t world_size() const { return static_cast<int32_t>(members_.size()); }
  void admit(int32_t rank, std::vector<HostBuffer> buffers);

  // As in Transport, for one rank.
  void open(int32_t rank, CompletionSink* sink);
  void start(int32_t rank, const Operation& operation);
  void abort(int32_t rank, const std::string& reason);
  void close(int32_t rank);
  // Abort and close in one, for a transport that goes in the middle of its work.
  void dismiss(int32_t rank);

 private:
  // An operation as one rank started it.
  struct Started {
    Operation operation;
    int64_t start_ns = 0;
    std::optional<std::string> fault;  // why it cannot begin
    bool completed = false;
  };
  struct Member {
    std::vector<HostBuffer> buffers;
    bool admitted = false;
    CompletionSink* sink = nullptr;
    std::deque<Started> started;      // the wire's first_index_ and later ones
    std::optional<std::string> left;  // why this rank is gone
    int32_t delivery_count = 0;       // completions that are on their way to the sink
  };
  struct Delivery {
    int32_t rank;
    int64_t ticket;
    std::optional<std::string> error;
  };

  void run();
  // All below: REQUIRES mutex_ held.
  std::vector<Delivery> failures_due();
  std::optional<std::string> failure_of(int32_t rank, const Started& started) const;
  // When the first operation is over, if all ranks have started it.
  std::optional<int64_t> first_finish_ns() const;
  std::optional<std::string> first_mismatch() const;
  std::vector<Delivery> pop_first(const std::optional<std::string>& error);
  void run_first(std::unique_lock<std::mutex>& lock);
  void deliver(std::unique_lock<std::mutex>& lock, const std::vector<Delivery>& deliveries);
  void check_rank(int32_t rank) const;

  // Constant after construction.
  const InprocCost cost_;

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable changed_;    // for the wire's thread
  std::condition_variable delivered_;  // for transports that close
  std::vector<Member> members_;        // by rank; their number is constant
  int64_t first_index_ = 0;            // of the operation that the wire takes next
  int64_t free_ns_ = 0;                // when the wire is done with the one before
  bool stopping_ = false;

  std::thread thread_;
};

}  // namespace gradcast
