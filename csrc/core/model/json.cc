// Profiles, links and plans as JSON, schema version 1.
#include <string>

#include "gradcast/error.h"
#include "gradcast/plan.h"
#include "gradcast/profile.h"
#include "model/json_fields.h"

namespace gradcast {
namespace {

constexpr int32_t kInFlightMax = 1'000'000;
// Above any link that exists: 2^53 ns for one byte.
constexpr double kCostMax = kTimeMaxNs;
constexpr double kPredictionMaxNs = 1e300;

LinkPiece piece_from(const Json& json, const std::string& path) {
  Fields fields(json, path, ErrorCode::kInvalidLink);
  LinkPiece piece;
  piece.up_to_bytes = fields.integer("up_to_bytes", 1, kBytesMax, kUnboundedBytes);
  piece.alpha_ns = fields.number("alpha_ns", 0, kCostMax);
  piece.beta_ns_per_byte = fields.number("beta_ns_per_byte", 0, kCostMax);
  piece.extra_json = fields.rest();
  return piece;
}

LinkModel link_from(const Json& json, const std::string& path) {
  Fields fields(json, path, ErrorCode::kInvalidLink);
  LinkModel link;
  for (const Op op : kOps) {
    const std::string name(to_string(op));
    if (fields.find(name) != nullptr) {
      link.of(op).pieces = fields.list(name, &piece_from);
    }
  }
  link.pack_ns_per_byte = fields.number("pack_ns_per_byte", 0, kCostMax, 0);
  link.extra_json = fields.rest();
  check_link(link);
  return link;
}

Tensor tensor_from(const Json& json, const std::string& path) {
  Fields fields(json, path, ErrorCode::kInvalidProfile);
  Tensor tensor;
  tensor.name = fields.text("name");
  // Ranges that need the whole profile (ready within backward, …) are check_profile's.
  tensor.bytes = fields.integer("bytes", 1, kBytesMax);
  tensor.buffer = static_cast<int32_t>(fields.integer("buffer", 0, INT32_MAX, 0));
  tensor.element_bytes = static_cast<int32_t>(fields.integer("element_bytes", 1, INT32_MAX, 4));
  tensor.ready_ns = fields.number("ready_ns", 0, kTimeMaxNs);
  tensor.need_ns = fields.number("need_ns", 0, kTimeMaxNs);
  tensor.update_ns = fields.number("update_ns", 0, kTimeMaxNs, 0);
  tensor.extra_json = fields.rest();
  return tensor;
}

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
  block.ranges = fields.list("ranges", &range_from);
  // A plan made by hand need not carry predictions.
  block.start_ns = fields.number("start_ns", 0, kPredictionMaxNs, 0);
  block.finish_ns = fields.number("finish_ns", 0, kPredictionMaxNs, 0);
  block.reason = fields.text("reason", "");
  block.extra_json = fields.rest();
  return block;
}

Json json_of(const LinkPiece& piece) {
  Json json = {{"up_to_bytes", piece.up_to_bytes == kUnboundedBytes ? Json() : Json(piece.up_to_bytes)},
               {"alpha_ns", piece.alpha_ns},
               {"beta_ns_per_byte", piece.beta_ns_per_byte}};
  add_rest(json, piece.extra_json);
  return json;
}

Json json_of(const Tensor& tensor) {
  Json json = {{"name", tensor.name},
               {"bytes", tensor.bytes},
               {"buffer", tensor.buffer},
               {"element_bytes", tensor.element_bytes},
               {"ready_ns", whole_ns(tensor.ready_ns)},
               {"need_ns", whole_ns(tensor.need_ns)},
               {"update_ns", whole_ns(tensor.update_ns)}};
  add_rest(json, tensor.extra_json);
  return json;
}

Json json_of(const Range& range) {
  return {range.lo_bytes, range.hi_bytes};
}

Json json_of(const Block& block);

template <typename Value>
Json list_of(const std::vector<Value>& values) {
  Json list = Json::array();
  for (const Value& value : values) {
    list.push_back(json_of(value));
  }
  return list;
}

Json json_of(const Block& block) {
  Json json = {{"op", to_string(block.op)},
               {"buffer", block.buffer},
               {"ranges", list_of(block.ranges)},
               {"start_ns", whole_ns(block.start_ns)},
               {"finish_ns", whole_ns(block.finish_ns)},
               {"reason", block.reason}};
  add_rest(json, block.extra_json);
  return json;
}

Json json_of(const LinkModel& link) {
  Json json = Json::object();
  for (const Op op : kOps) {
    if (link.of(op).available()) {
      json[std::string(to_string(op))] = list_of(link.of(op).pieces);
    }
  }
  if (link.pack_ns_per_byte != 0) {
    json["pack_ns_per_byte"] = link.pack_ns_per_byte;
  }
  add_rest(json, link.extra_json);
  return json;
}

}  // namespace

Profile profile_from_json(std::string_view text) {
  const Json json = parse_json(text, "profile", ErrorCode::kInvalidProfile);
  Fields fields(json, "", ErrorCode::kInvalidProfile);
  fields.expect_version_1();
  Profile profile;
  profile.name = fields.text("name");
  profile.world_size = static_cast<int32_t>(fields.integer("world_size", 1, INT32_MAX));
  profile.forward_ns = fields.number("forward_ns", 0, kTimeMaxNs);
  profile.backward_ns = fields.number("backward_ns", 0, kTimeMaxNs);
  profile.tensors = fields.list("tensors", &tensor_from);
  if (const Json* link = fields.find("link"); link != nullptr && !(link->is_object() && link->empty())) {
    profile.link = link_from(*link, "link");
  }
  profile.extra_json = fields.rest();
  check_profile(profile);
  sort_by_urgency(profile);
  return profile;
}

std::string to_json(const Profile& profile) {
  Json json = {{"version", 1},
               {"name", profile.name},
               {"world_size", profile.world_size},
               {"forward_ns", whole_ns(profile.forward_ns)},
               {"backward_ns", whole_ns(profile.backward_ns)},
               {"tensors", list_of(profile.tensors)}};
  if (profile.link != LinkModel{}) {
    json["link"] = json_of(profile.link);
  }
  add_rest(json, profile.extra_json);
  return to_text(json, "tensors");
}

LinkModel link_from_json(std::string_view text) {
  return link_from(parse_json(text, "link", ErrorCode::kInvalidLink), "link");
}

std::string to_json(const LinkModel& link) {
  return json_of(link).dump(1) + "\n";
}

Plan plan_from_json(std::string_view text) {
  const Json json = parse_json(text, "plan", ErrorCode::kInvalidPlan);
  Fields fields(json, "", ErrorCode::kInvalidPlan);
  fields.expect_version_1();
  Plan plan;
  plan.policy = fields.text("policy");
  plan.mode = word(fields, "mode", &mode_from_string);
  plan.in_flight = static_cast<int32_t>(fields.integer("in_flight", 1, kInFlightMax, 1));
  plan.blocks = fields.list("blocks", &block_from);
  plan.predicted_ns = fields.number("predicted_ns", 0, kPredictionMaxNs, 0);
  plan.bound_ns = fields.number("bound_ns", 0, kPredictionMaxNs, 0);
  plan.plain_bound_ns = fields.number("plain_bound_ns", 0, kPredictionMaxNs, 0);
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
               {"plain_bound_ns", whole_ns(plan.plain_bound_ns)},
               {"blocks", list_of(plan.blocks)}};
  add_rest(json, plan.extra_json);
  return to_text(json, "blocks");
}

}  // namespace gradcast
