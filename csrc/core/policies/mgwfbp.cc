// mgwfbp: merged-gradient wait-free backpropagation: neighbours in ready order are merged where that saves time.
//
// Walking through the gradients in ready order, the group that is being formed takes the next gradient in when the
// link would still be busy with the group by then, and either the group could not have started by then (waiting is
// free), or it would have started less than one start-up cost earlier (waiting costs less than it saves).
//
// Source: Shi, Chu, Li, "MG-WFBP" (INFOCOM 2019; TPDS 2021), algorithm 1; _generate_groups_mgwfbp of the authors'
// code.
//
// Choices: a "layer" of the paper is one tensor, as in its code. A group may span buffers and is then one operation
// per buffer; its cost is the sum. Where the link is piecewise, the start-up cost is that of the group's size. The
// paper's model has one operation at a time, for any in_flight.
#include <algorithm>
#include <iterator>
#include <map>
#include <string>

#include "policies/online.h"
#include "policies/published.h"

namespace gradcast {
namespace {

// The group that is being formed: its tensors, and what it costs as one operation per buffer.
class Group {
 public:
  explicit Group(const Problem& problem) : problem_(&problem) {}

  void add(int32_t tensor) {
    pieces_.push_back({tensor, 0, problem_->bytes[tensor]});
    int64_t& size_bytes = size_bytes_[problem_->buffer[tensor]];
    if (size_bytes > 0) {
      cost_ns_ -= problem_->link.all_reduce.cost_ns(size_bytes);
    }
    size_bytes += problem_->bytes[tensor];
    cost_ns_ += problem_->link.all_reduce.cost_ns(size_bytes);
    alpha_ns_ = problem_->link.all_reduce.piece(size_bytes).alpha_ns;
  }

  double cost_ns() const { return cost_ns_; }
  // The saving of a further tensor that is no operation of its own.
  double alpha_ns() const { return alpha_ns_; }

  void close(std::vector<Block>& blocks) {
    const std::string reason = pieces_.size() == 1 ? "alone" : std::to_string(pieces_.size()) + " tensors merged";
    std::ranges::move(joint_blocks(*problem_, pieces_, reason), std::back_inserter(blocks));
    pieces_.clear();
    size_bytes_.clear();
    cost_ns_ = 0;
  }

 private:
  const Problem* problem_;
  std::vector<Piece> pieces_;
  std::map<int32_t, int64_t> size_bytes_;  // by buffer
  double cost_ns_ = 0;
  double alpha_ns_ = 0;
};

}  // namespace

std::vector<Block> mgwfbp(const Problem& problem, const NoOptions& /*options*/) {
  std::vector<Block> blocks;
  const std::vector<int32_t> arrivals = by_ready(problem);
  Group group(problem);
  double link_free_ns = 0;  // when the closed groups are through
  for (size_t at = 0; at < arrivals.size(); ++at) {
    group.add(arrivals[at]);
    if (at + 1 == arrivals.size()) {
      break;
    }
    const double start_ns = std::max(link_free_ns, problem.ready_ns[arrivals[at]]);
    // The paper asks that the link is still busy with the group when the next is ready, and that the group has not
    // started by then or less than alpha ago. The last of these implies the others, since no operation is shorter than
    // alpha.
    if (problem.ready_ns[arrivals[at + 1]] - start_ns >= group.alpha_ns()) {
      link_free_ns = start_ns + group.cost_ns();
      group.close(blocks);
    }
  }
  group.close(blocks);
  return blocks;
}

}  // namespace gradcast
