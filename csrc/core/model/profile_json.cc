// Profiles and links as JSON, schema version 1.
#include <string>
#include <utility>

#include "gradcast/error.h"
#include "gradcast/profile.h"
#include "model/json_fields.h"

namespace gradcast {
namespace {

constexpr Op kOps[] = {Op::kAllReduce, Op::kReduceScatter, Op::kAllGather};
// Above any link that exists: 2^53 ns for one byte.
constexpr double kCostMax = kTimeMaxNs;

LinkPiece piece_from(const Json& json, const std::string& path) {
  Fields fields(json, path, ErrorCode::kInvalidLink);
  LinkPiece piece;
  piece.up_to_bytes = fields.integer("up_to_bytes", 1, kBytesMax, kUnboundedBytes);
  piece.alpha_ns = fields.number("alpha_ns", 0, kCostMax);
  piece.beta_ns_per_byte = fields.number("beta_ns_per_byte", 0, kCostMax);
  piece.extra_json = fields.rest();
  return piece;
}

OpCost& cost_of(LinkModel& link, Op op) {
  return op == Op::kAllReduce ? link.all_reduce : op == Op::kReduceScatter ? link.reduce_scatter : link.all_gather;
}

LinkModel link_from(const Json& json, const std::string& path) {
  Fields fields(json, path, ErrorCode::kInvalidLink);
  LinkModel link;
  for (const Op op : kOps) {
    const std::string name(to_string(op));
    if (fields.find(name.c_str()) == nullptr) {
      continue;
    }
    const Json& pieces = fields.array(name.c_str());
    for (size_t i = 0; i < pieces.size(); ++i) {
      cost_of(link, op).pieces.push_back(piece_from(pieces[i], fields.path_of(name) + "[" + std::to_string(i) + "]"));
    }
  }
  link.pack_ns_per_byte = fields.number("pack_ns_per_byte", 0, kCostMax, 0);
  link.extra_json = fields.rest();
  check_link(link);
  return link;
}

Json json_of(const LinkModel& link) {
  Json json = Json::object();
  for (const Op op : kOps) {
    if (!link.of(op).available()) {
      continue;
    }
    Json pieces = Json::array();
    for (const LinkPiece& piece : link.of(op).pieces) {
      const bool unbounded = piece.up_to_bytes == kUnboundedBytes;
      Json row = {{"up_to_bytes", unbounded ? Json() : Json(piece.up_to_bytes)},
                  {"alpha_ns", piece.alpha_ns},
                  {"beta_ns_per_byte", piece.beta_ns_per_byte}};
      add_rest(row, piece.extra_json);
      pieces.push_back(std::move(row));
    }
    json[std::string(to_string(op))] = std::move(pieces);
  }
  if (link.pack_ns_per_byte != 0) {
    json["pack_ns_per_byte"] = link.pack_ns_per_byte;
  }
  add_rest(json, link.extra_json);
  return json;
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
  const Json& tensors = fields.array("tensors");
  profile.tensors.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    profile.tensors.push_back(tensor_from(tensors[i], "tensors[" + std::to_string(i) + "]"));
  }
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
               {"backward_ns", whole_ns(profile.backward_ns)}};
  Json tensors = Json::array();
  for (const Tensor& tensor : profile.tensors) {
    tensors.push_back(json_of(tensor));
  }
  json["tensors"] = std::move(tensors);
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

}  // namespace gradcast
