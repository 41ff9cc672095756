// Plans as JSON, schema version 1.
#include <algorithm>
#include <string>
#include <utility>

#include "gradcast/error.h"
#include "gradcast/plan.h"
#include "model/json_fields.h"

namespace gradcast {
namespace {

constexpr int32_t kInFlightMax = 1'000'000;

template <typename Enum>
Enum word(Fields& fields, const char* key, Enum (*from_string)(std::string_view)) {
  const std::string name = fields.text(key);
  try {
    return from_string(name);
  } catch (const Error& error) {
    fields.refuse(key, std::string("is wrong: ") + error.what());
  }
}

Range range_from(const Json& json, const std::string& path) {
  const auto whole = [](const Json& value) {
    return value.is_number_unsigned() && value.get<uint64_t>() <= static_cast<uint64_t>(kBytesMax);
  };
  if (!json.is_array() || json.size() != 2 || !whole(json[0]) || !whole(json[1]) || json[0] >= json[1]) {
    throw Error(ErrorCode::kInvalidPlan,
                path + " is no range; two whole numbers [lo, hi) are expected, the first below the second");
  }
  return {json[0].get<int64_t>(), json[1].get<int64_t>()};
}

Block block_from(const Json& json, const std::string& path) {
  Fields fields(json, path, ErrorCode::kInvalidPlan);
  Block block;
  block.op = word(fields, "op", &op_from_string);
  block.buffer = static_cast<int32_t>(fields.integer("buffer", 0, INT32_MAX, 0));
  const Json& ranges = fields.array("ranges");
  for (size_t i = 0; i < ranges.size(); ++i) {
    block.ranges.push_back(range_from(ranges[i], path + ".ranges[" + std::to_string(i) + "]"));
  }
  // A plan made by hand need not carry predictions.
  block.start_ns = fields.number("start_ns", 0, 1e300, 0);
  block.finish_ns = fields.number("finish_ns", 0, 1e300, 0);
  block.reason = fields.text("reason", "");
  block.extra_json = fields.rest();
  return block;
}

Json json_of(const Block& block) {
  Json ranges = Json::array();
  for (const Range& range : block.ranges) {
    ranges.push_back({range.lo_bytes, range.hi_bytes});
  }
  Json json = {{"op", to_string(block.op)},
               {"buffer", block.buffer},
               {"ranges", std::move(ranges)},
               {"start_ns", whole_ns(block.start_ns)},
               {"finish_ns", whole_ns(block.finish_ns)},
               {"reason", block.reason}};
  add_rest(json, block.extra_json);
  return json;
}

}  // namespace

Plan plan_from_json(std::string_view text) {
  const Json json = parse_json(text, "plan", ErrorCode::kInvalidPlan);
  Fields fields(json, "", ErrorCode::kInvalidPlan);
  fields.expect_version_1();
  Plan plan;
  plan.policy = fields.text("policy");
  plan.mode = word(fields, "mode", &mode_from_string);
  plan.in_flight = static_cast<int32_t>(fields.integer("in_flight", 1, kInFlightMax, 1));
  const Json& blocks = fields.array("blocks");
  plan.blocks.reserve(blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i) {
    plan.blocks.push_back(block_from(blocks[i], "blocks[" + std::to_string(i) + "]"));
  }
  plan.predicted_ns = fields.number("predicted_ns", 0, 1e300, 0);
  plan.bound_ns = fields.number("bound_ns", 0, 1e300, 0);
  plan.plain_bound_ns = fields.number("plain_bound_ns", 0, 1e300, 0);
  plan.extra_json = fields.rest();
  return plan;
}

std::string to_json(const Plan& plan) {
  Json json = {{"version", 1},
               {"policy", plan.policy},
               {"mode", to_string(plan.mode)},
               {"in_flight", plan.in_flight},
               {"predicted_ns", whole_ns(plan.predicted_ns)},
               {"bound_ns", whole_ns(plan.bound_ns)},
               {"plain_bound_ns", whole_ns(plan.plain_bound_ns)}};
  Json blocks = Json::array();
  for (const Block& block : plan.blocks) {
    blocks.push_back(json_of(block));
  }
  json["blocks"] = std::move(blocks);
  add_rest(json, plan.extra_json);
  return to_text(json, "blocks");
}

}  // namespace gradcast
