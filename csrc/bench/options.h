// The command line of gradcast-bench.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <string>

#include "bench/schedule.h"
#include "bench/sweep.h"
#include "gradcast/inproc.h"

namespace gradcast {

struct BenchOptions {
  bool help = false;
  bool json = false;
  bool parts = false;
  bool runs_sweep = false;
  bool runs_schedule = false;
  bool runs_overhead = false;
  std::string transport = "inproc";  // or "mpi", "nccl"
  int32_t rank_count = 4;            // inproc: threads
  InprocCost network;                // inproc: what it emulates
  std::string profile = "resnet50";  // a bundled one's name, or a file
  double compute_ms = 0;             // of a step; 0: as the profile says
  double scale_size = 1;             // of every gradient
  SweepOptions sweep;
  ScheduleOptions schedule;
};

extern const char* const kBenchHelp;

// Throws Error{kInvalidOption} that says what is wrong and what is right.
BenchOptions parse_options(int argc, char** argv);

}  // namespace gradcast
