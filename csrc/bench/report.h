// The results, as tables for people and as JSON for `gradcast report`.
//
// Thread safety: pure; any thread.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bench/instant_transport.h"
#include "bench/options.h"
#include "bench/place.h"
#include "bench/schedule.h"
#include "bench/sweep.h"
#include "gradcast/link_fit.h"

namespace gradcast {

struct BenchResults {
  int32_t world_size = 1;
  std::vector<Place> places;  // by rank
  std::vector<SweepRow> sweep;
  std::map<Op, LinkFit> fits;
  LinkModel link;       // of the fits
  std::string profile;  // its name
  std::vector<ScheduleRow> schedule;
  std::optional<Overhead> overhead;
};

std::string title(const BenchOptions& options, const BenchResults& results);
// The table of the sweep row by row: large operations take long.
std::string sweep_header(bool has_stream);
std::string sweep_line(const SweepRow& row, int32_t world_size);
std::string fits_text(const BenchResults& results);
std::string schedule_table(const BenchResults& results);
std::string overhead_table(const BenchResults& results);
// {"MPI": …, "CUDA": …, "NCCL": …}, each a sentence.
std::string parts_json();
// One object, schema version 1 (docs/reference/file-formats.md).
std::string to_json(const BenchOptions& options, const BenchResults& results);

}  // namespace gradcast
