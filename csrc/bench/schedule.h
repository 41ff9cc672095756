// The scheduling sweep: training without a model. A profile's compute is played by waiting, its gradients are sent over
// the real transport through the engine, under one policy after the other.
//
// Thread safety: any thread, but each Group one.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bench/group.h"
#include "bench/network.h"
#include "gradcast/profile.h"
#include "gradcast/types.h"

namespace gradcast {

struct ScheduleOptions {
  Mode mode = Mode::kOverlap;
  int32_t in_flight = 1;
  int32_t round_count = 5;  // in each, every policy runs once: what else the machines do falls on all of them alike
  int32_t step_count = 3;   // of a round, after one that does not count
};

struct ScheduleRow {
  std::string policy;
  int32_t block_count = 0;
  double step_ns = 0;  // the median over rounds and steps of the slowest rank
  double low_ns = 0;
  double high_ns = 0;
  double predicted_ns = 0;
  double bound_ns = 0;    // no plan with these kinds of operation is faster
  double compute_ns = 0;  // a step without communication

  double exposed_ns() const { return step_ns - compute_ns; }
  double prediction_error() const { return predicted_ns / step_ns - 1; }
};

// Every policy that the profile's link allows in this mode; the same rows on every rank.
// Throws Error{kCommunication} where a step has not ended after a minute.
// Calls `tell` before each round, with its number from 1.
std::vector<ScheduleRow> schedule(Group& group, Network& network, const Profile& profile,
                                  const ScheduleOptions& options, const std::function<void(int32_t round)>& tell);

// The profile with all times and all sizes multiplied; each tensor keeps at least one element.
Profile scaled(const Profile& profile, double time_factor, double bytes_factor);

}  // namespace gradcast
