// The parts that the policies of the literature share.
#include "policies/online.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/core/policies/policy_cases.h"
#include "tests/core/profiles.h"
#include "tests/support/refusals.h"

namespace gradcast {
namespace {

TEST(ByReady, EqualTimesComeInBackwardsOrder) {
  EXPECT_EQ(by_ready(problem_of({{1, 3}, {1, 2}, {1, 2}, {1, 1}})), (std::vector<int32_t>{3, 2, 1, 0}));
  EXPECT_EQ(by_ready(problem_of({{1, 2}, {1, 5}, {1, 2}, {1, 0}})), (std::vector<int32_t>{3, 2, 0, 1}));
}

// The clock that policies decide by must be the clock that their plans are judged by.
TEST(VirtualLink, AgreesWithPlay) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Profile profile =
        random_profile(seed, {.buffer_count = 2, .link_piece_count = 1 + static_cast<int32_t>(seed % 3)});
    const Problem problem = make_problem(profile, profile.link, Mode::kOverlap, 1 + static_cast<int32_t>(seed / 3 % 3));
    std::vector<Block> blocks;
    std::vector<Piece> pieces;
    for (int32_t tensor = 0; tensor < problem.tensor_count(); ++tensor) {
      pieces.push_back({tensor, 0, problem.bytes[tensor]});
      blocks.push_back(piece_block(problem, pieces.back(), "test"));
    }
    const Timeline timeline = play(problem, blocks);
    VirtualLink link(problem);
    for (size_t k = 0; k < blocks.size(); ++k) {
      EXPECT_DOUBLE_EQ(link.launch(problem.ready_ns[k], problem.bytes[k]), timeline.blocks[k].finish_ns);
    }
    EXPECT_DOUBLE_EQ(pieces_iteration_ns(problem, pieces), timeline.iteration_ns);
  }
}

TEST(VirtualLink, IsFreeWhenFewerThanInFlightAreUnfinished) {
  const Problem problem = problem_of({{9, 0}}, {.in_flight = 2});
  VirtualLink link(problem);
  EXPECT_EQ(link.free_ns(), 0);
  EXPECT_EQ(link.launch(5, 3), 9);
  EXPECT_EQ(link.free_ns(), 5);      // the second may go, but not before the first
  EXPECT_EQ(link.launch(6, 3), 12);  // its start-up hides behind the first
  EXPECT_EQ(link.free_ns(), 9);
}

TEST(ReadyQueue, GivesTheMostUrgentOfWhatIsReady) {
  const Problem problem = problem_of({{4, 9}, {5, 3}, {6, 1}});
  const std::vector<int32_t> arrivals = by_ready(problem);
  ReadyQueue queue(problem, arrivals);
  EXPECT_TRUE(queue.empty());
  EXPECT_EQ(queue.next_ready_ns(), 1);
  queue.admit(2);
  EXPECT_EQ(queue.take(4), (Piece{2, 0, 4}));
  queue.admit(3);
  EXPECT_EQ(queue.take(100), (Piece{1, 0, 5}));
  EXPECT_EQ(queue.top(), (Piece{2, 4, 6}));
  EXPECT_EQ(queue.sent_bytes(2), 4);
  EXPECT_EQ(queue.take(2), (Piece{2, 4, 6}));
  EXPECT_TRUE(queue.empty());
  EXPECT_FALSE(queue.finished());
  queue.admit_all();
  EXPECT_EQ(queue.take(4), (Piece{0, 0, 4}));
  EXPECT_TRUE(queue.finished());
  EXPECT_TRUE(std::isinf(queue.next_ready_ns()));
}

TEST(ReadyQueue, FollowsAnotherOrderOfPriorities) {
  const Problem problem = problem_of({{4, 9}, {5, 3}, {6, 1}});
  const std::vector<int32_t> arrivals = by_ready(problem);
  const std::vector<int32_t> rank = {1, 2, 0};
  ReadyQueue queue(problem, arrivals, rank);
  queue.admit_all();
  EXPECT_EQ(queue.take(99).tensor, 2);
  EXPECT_EQ(queue.take(99).tensor, 0);
  EXPECT_EQ(queue.take(99).tensor, 1);
}

TEST(Units, AreWholeElements) {
  Profile profile = profile_of({{12, 0}, {4, 0}});
  profile.tensors[0].element_bytes = profile.tensors[1].element_bytes = 4;
  const Problem problem = make_problem(profile, profile.link, Mode::kOverlap, 1);
  EXPECT_EQ(whole_elements_bytes(problem, 0, 11), 8);
  EXPECT_EQ(whole_elements_bytes(problem, 0, 3), 4);
  EXPECT_EQ(unit_count(problem, 11), 3);
  EXPECT_EQ(unit_count(problem, 1), 4);
}

TEST(Joined, SortsAndMergesNeighbours) {
  EXPECT_EQ(joined({{8, 9}, {4, 8}, {0, 3}}), (std::vector<Range>{{0, 3}, {4, 9}}));
  EXPECT_EQ(joined({{4, 8}, {0, 3}, {8, 9}, {3, 4}}), (std::vector<Range>{{0, 9}}));
}

TEST(JointBlocks, OnePerBufferInOrderOfAppearance) {
  const Problem problem = problem_of({{2, 0, 0, 0, 0}, {3, 0, 0, 0, 1}, {4, 0, 0, 0, 0}});
  const std::vector<Piece> pieces = {{1, 1, 3}, {2, 0, 4}, {0, 0, 2}};
  EXPECT_EQ(shown(joint_blocks(problem, pieces, "test")), (Shown{"1:[1,3)", "0:[0,6)"}));
}

}  // namespace
}  // namespace gradcast
