#include "bench/run.h"

#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "bench/options.h"
#include "bench/report.h"
#include "gradcast/error.h"

namespace gradcast {
namespace {

std::string read(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) {
    throw Error(ErrorCode::kInvalidOption, "the profile " + path.string() + " cannot be read");
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

// A file, or one of the profiles beside the program or in the source tree it was built from.
Profile load_profile(const std::string& name) {
  if (std::filesystem::exists(name) && !std::filesystem::is_directory(name)) {
    return profile_from_json(read(name));
  }
  std::error_code ignored;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  for (const auto& folder : {program.parent_path() / "../share/gradcast/profiles", program.parent_path() / "../data",
                             std::filesystem::path(GRADCAST_DATA_DIR)}) {
    const auto path = folder / (name + ".json");
    if (std::filesystem::exists(path)) {
      return profile_from_json(read(path));
    }
  }
  throw Error(ErrorCode::kInvalidOption, "there is no file and no bundled profile '" + name + "'");
}

void say(const Group& group, const BenchOptions& options, const std::string& text) {
  if (group.rank() == 0 && !options.json) {
    std::fputs(text.c_str(), stdout);
    std::fflush(stdout);
  }
}

void measure_network(Group& group, Network& network, const BenchOptions& options, BenchResults& results) {
  say(group, options, sweep_header(group.stream_ns().has_value()));
  results.sweep = sweep(group, network, options.sweep,
                        [&](const SweepRow& row) { say(group, options, sweep_line(row, group.world_size())); });
  std::map<Op, std::vector<LinkSample>> samples;
  for (const SweepRow& row : results.sweep) {
    if (row.in_place) samples[row.op].push_back({row.size_bytes, row.time_ns});  // as training sends
  }
  for (const auto& [op, of_op] : samples) {
    if (of_op.size() >= 3) {
      results.fits[op] = fit_op_cost(of_op);
      results.link.of(op) = results.fits[op].cost;
    }
  }
  results.link.pack_ns_per_byte = group.pack_ns_per_byte();
}

// Rank 0's, so that all ranks plan with the same numbers.
LinkModel common_link(Group& group, const BenchResults& results) {
  if (results.fits.size() < 3) {
    throw Error(ErrorCode::kInvalidOption,
                "the schedule needs a sweep of three sizes or more to know the network's cost");
  }
  return link_from_json(group.from_first(to_json(results.link)));
}

Profile profile_of(const BenchOptions& options) {
  const Profile profile = load_profile(options.profile);
  const double time_factor =
      options.compute_ms == 0 ? 1 : options.compute_ms * 1e6 / (profile.forward_ns + profile.backward_ns);
  return scaled(profile, time_factor, options.scale_size);
}

void measure(Group& group, const BenchOptions& options, Profile profile, BenchResults& results) {
  Network network(group, profile.tensors, memory_of(options.sweep));
  measure_network(group, network, options, results);
  say(group, options, "\n" + fits_text(results) + "\n");
  if (options.runs_schedule) {
    profile.link = common_link(group, results);
    results.profile = profile.name;
    results.schedule = schedule(group, network, profile, options.schedule, [&](int32_t round) {
      say(group, options,
          "round " + std::to_string(round) + " of " + std::to_string(options.schedule.round_count) + "\n");
    });
    say(group, options, schedule_table(results) + "\n");
  }
}

void run(Group& group, const BenchOptions& options) {
  // Before minutes of measuring: it may not be there.
  const Profile profile = options.runs_schedule ? profile_of(options) : Profile{};
  BenchResults results;
  results.world_size = group.world_size();
  results.places = places(group);
  say(group, options, title(options, results));
  if (options.runs_sweep || options.runs_schedule) {
    measure(group, options, profile, results);
  }
  if (options.runs_overhead) {
    group.barrier();
    if (group.rank() == 0) {
      results.overhead = engine_overhead();
      say(group, options, overhead_table(results));
    }
    group.barrier();
  }
  if (options.json && group.rank() == 0) {
    std::fputs(to_json(options, results).c_str(), stdout);
    std::fflush(stdout);
  }
  int64_t wrong_count = 0;
  for (const SweepRow& row : results.sweep) {
    wrong_count += row.error_count;
  }
  if (wrong_count > 0) {
    throw Error(ErrorCode::kCommunication,
                std::to_string(wrong_count) + " elements were not the exact sum: do not train over this transport");
  }
}

int run_with_errors(int argc, char** argv) {
  const BenchOptions options = parse_options(argc, argv);
  if (options.help) {
    std::fputs(kBenchHelp, stdout);
    return 0;
  }
  if (options.parts) {
    std::fputs(parts_json().c_str(), stdout);
    return 0;
  }
  const auto action = [&](Group& group) { run(group, options); };
  if (options.transport != "inproc") {
    run_under_mpi(options.transport == "mpi" ? Carrier::kMpi : Carrier::kNccl, action);
  } else {
    run_as_threads(options.rank_count, options.network, action);
  }
  return 0;
}

}  // namespace

int run_bench(int argc, char** argv) {
  try {
    return run_with_errors(argc, argv);
  } catch (const Error& error) {
    std::fprintf(stderr, "gradcast-bench: %s\n", error.what());
    return error.code() == ErrorCode::kInvalidOption ? 2 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gradcast-bench: %s\n", error.what());
    return 1;
  }
}

}  // namespace gradcast
