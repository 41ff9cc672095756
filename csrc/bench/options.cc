#include "bench/options.h"

#include <getopt.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>
#include <vector>

#include "gradcast/error.h"

namespace gradcast {

const char* const kBenchHelp =
    R"(gradcast-bench: what the collectives of this cluster cost, and what each policy makes of that.

  mpirun -n 4 gradcast-bench --transport mpi                  between processes, also of several hosts
  gradcast-bench --ranks 4 --alpha-us 200 --gbit 10           between threads, over an emulated network

Runs all three parts, or those that are named:
  --sweep              operations of all sizes, in the columns of nccl-tests, and the line through them
  --schedule           a profile's gradients under every policy; compute is played by waiting
  --overhead           what the engine itself costs per block

The network:
  --transport NAME     inproc (threads of this process), mpi, or nccl      [inproc]
  --ranks N            inproc: so many threads                             [4]
  --alpha-us X         inproc: every operation takes so long               [0]
  --gbit X             inproc: and its bytes go at this rate               [without limit]
The sweep:
  --dtype T            fp32, bf16 or fp64                                  [fp32]
  --out-of-place       each size also from other memory than it writes
  --bytes-min N        smallest size; k, M and G may follow (1024s)        [1k]
  --bytes-max N        largest size                                        [64M]
  --factor X           from one size to the next                           [2]
  --iterations N       of each size that are measured                      [20]
  --warmup N           before them, not measured                           [5]
The schedule:
  --profile P          a bundled profile (resnet50, vgg16, ...) or a file  [resnet50]
  --compute-ms X       compute of a step                                   [the profile's]
  --scale-size X       multiplies every gradient                           [1]
  --mode M             overlap or hook                                     [overlap]
  --in-flight N        blocks at the same time                             [1]
  --rounds N           every policy once in each                           [5]
  --steps N            of a policy in a round, after one                   [3]

  --json               one JSON object instead of tables
  --parts              what this build has, as JSON
  --help               this text
)";

namespace {

[[noreturn]] void refuse(const std::string& name, const std::string& text, const std::string& wanted) {
  throw Error(ErrorCode::kInvalidOption, "--" + name + " is '" + text + "'; " + wanted + " is expected");
}

double number(const std::string& name, const std::string& text, double least, double most) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (end == text.c_str() || *end != '\0' || !(value >= least) || !(value <= most)) {
    char range[96];
    std::snprintf(range, sizeof range, "a number from %g to %g", least, most);
    refuse(name, text, range);
  }
  return value;
}

int32_t count(const std::string& name, const std::string& text, int32_t most, int32_t least = 1) {
  const double value = number(name, text, least, most);
  if (value != std::floor(value)) {
    refuse(name, text, "a whole number");
  }
  return static_cast<int32_t>(value);
}

int64_t bytes(const std::string& name, std::string text) {
  const std::string all = text;
  double unit = 1;
  if (!text.empty()) {
    const std::map<char, double> units = {{'k', 1024.0}, {'K', 1024.0}, {'M', 1048576.0}, {'G', 1073741824.0}};
    if (const auto found = units.find(text.back()); found != units.end()) {
      unit = found->second;
      text.pop_back();
    }
  }
  char* end = nullptr;
  const double value = unit * std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(value >= 4) || !(value <= 64.0 * (1 << 30))) {
    refuse(name, all, "a size from 4 to 64G, for instance 512k,");
  }
  return std::llround(value);
}

std::string one_of(const std::string& name, const std::string& text, const std::vector<std::string>& known) {
  std::string words;
  for (const std::string& word : known) {
    if (word == text) {
      return text;
    }
    words += (words.empty() ? "" : " or ") + word;
  }
  refuse(name, text, words);
}

using Setter = std::function<void(BenchOptions&, const std::string& name, const std::string& text)>;

const std::map<std::string, Element> kElements = {
    {"fp32", Element::kFloat32}, {"bf16", Element::kBFloat16}, {"fp64", Element::kFloat64}};

const std::map<std::string, Setter>& setters() {
  static const std::map<std::string, Setter> all = {
      {"transport",
       [](auto& o, const auto& n, const auto& t) {
         o.transport = one_of(n, t, {"inproc", "mpi", "nccl"});
       }},
      {"ranks", [](auto& o, const auto& n, const auto& t) { o.rank_count = count(n, t, 1024); }},
      {"alpha-us", [](auto& o, const auto& n, const auto& t) { o.network.alpha_ns = 1e3 * number(n, t, 0, 1e7); }},
      {"gbit", [](auto& o, const auto& n, const auto& t) { o.network.beta_ns_per_byte = 8 / number(n, t, 1e-3, 1e5); }},
      {"dtype",
       [](auto& o, const auto& n, const auto& t) {
         o.sweep.element = kElements.at(one_of(n, t, {"fp32", "bf16", "fp64"}));
       }},
      {"bytes-min", [](auto& o, const auto& n, const auto& t) { o.sweep.bytes_min = bytes(n, t); }},
      {"bytes-max", [](auto& o, const auto& n, const auto& t) { o.sweep.bytes_max = bytes(n, t); }},
      {"factor", [](auto& o, const auto& n, const auto& t) { o.sweep.factor = number(n, t, 1.1, 1024); }},
      {"iterations", [](auto& o, const auto& n, const auto& t) { o.sweep.iteration_count = count(n, t, 1'000'000); }},
      {"warmup", [](auto& o, const auto& n, const auto& t) { o.sweep.warmup_count = count(n, t, 1'000'000, 0); }},
      {"profile", [](auto& o, const auto&, const auto& t) { o.profile = t; }},
      {"compute-ms", [](auto& o, const auto& n, const auto& t) { o.compute_ms = number(n, t, 0.001, 1e6); }},
      {"scale-size", [](auto& o, const auto& n, const auto& t) { o.scale_size = number(n, t, 1e-9, 1e3); }},
      {"mode",
       [](auto& o, const auto& n, const auto& t) {
         o.schedule.mode = mode_from_string(one_of(n, t, {"overlap", "hook"}));
       }},
      {"in-flight", [](auto& o, const auto& n, const auto& t) { o.schedule.in_flight = count(n, t, 64); }},
      {"rounds", [](auto& o, const auto& n, const auto& t) { o.schedule.round_count = count(n, t, 10'000); }},
      {"steps", [](auto& o, const auto& n, const auto& t) { o.schedule.step_count = count(n, t, 10'000); }},
  };
  return all;
}

}  // namespace

BenchOptions parse_options(int argc, char** argv) {
  BenchOptions options;
  const std::map<std::string, bool*> flags = {{"sweep", &options.runs_sweep},
                                              {"schedule", &options.runs_schedule},
                                              {"overhead", &options.runs_overhead},
                                              {"out-of-place", &options.sweep.out_of_place},
                                              {"json", &options.json},
                                              {"parts", &options.parts},
                                              {"help", &options.help}};
  std::vector<option> known;
  for (const auto& [name, flag] : flags) {
    known.push_back({name.c_str(), no_argument, nullptr, 0});
  }
  for (const auto& [name, setter] : setters()) {
    known.push_back({name.c_str(), required_argument, nullptr, 0});
  }
  known.push_back({});
  opterr = 0;
  optind = 1;
  int index = 0;
  for (int found = 0; (found = getopt_long(argc, argv, ":", known.data(), &index)) != -1;) {
    if (found != 0) {
      throw Error(ErrorCode::kInvalidOption, std::string(argv[optind - 1]) +
                                                 (found == ':' ? " lacks its value" : " is not an option") +
                                                 "; gradcast-bench --help lists them");
    }
    if (const auto flag = flags.find(known[index].name); flag != flags.end()) {
      *flag->second = true;
    } else {
      setters().at(known[index].name)(options, known[index].name, optarg);
    }
  }
  if (optind < argc) {
    throw Error(ErrorCode::kInvalidOption,
                std::string("'") + argv[optind] + "' is not an option; gradcast-bench --help lists them");
  }
  if (!options.runs_sweep && !options.runs_schedule && !options.runs_overhead) {
    options.runs_sweep = options.runs_schedule = options.runs_overhead = true;
  }
  if (options.runs_schedule && options.sweep.element != Element::kFloat32) {
    throw Error(ErrorCode::kInvalidOption,
                "the schedule plans with the cost of float32, and --dtype is for the sweep; add --sweep");
  }
  if (options.sweep.bytes_max < options.sweep.bytes_min) {
    throw Error(ErrorCode::kInvalidOption, "--bytes-max is below --bytes-min");
  }
  return options;
}

}  // namespace gradcast
