// A profile: what one training iteration asks of the network, as measured. The input of every policy.
//
// Tensor 0 is needed first by forward; a lower index is more urgent. Urgency order is need ascending, then ready
// descending, then the order in which the tensors were given; buffers are laid out in it, so a lower offset is more
// urgent.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gradcast/link.h"

namespace gradcast {

// One parameter's gradient.
struct Tensor {
  std::string name;
  int64_t bytes = 0;          // at least 1, a multiple of element_bytes
  int32_t buffer = 0;         // the flat array that holds it: one per (dtype, device)
  int32_t element_bytes = 4;  // the same for every tensor of a buffer
  double ready_ns = 0;   // from the start of backward until the gradient exists on the slowest rank; in [0, backward]
  double need_ns = 0;    // from the start of forward until the parameter is read, nothing waited for; in [0, forward]
  double update_ns = 0;  // work of the optimizer for it, on the device that runs forward
  std::string extra_json{};  // unknown fields of the JSON object, kept; "" if none

  bool operator==(const Tensor&) const = default;
};

struct Profile {
  std::string name;
  int32_t world_size = 1;
  double forward_ns = 0;
  double backward_ns = 0;
  std::vector<Tensor> tensors;  // urgency order
  LinkModel link;               // without any kind of operation where the network is not known yet
  double part_ns = 0;  // of each part of the optimizer's step beyond the first, on the device that runs forward
  // Of the thread that trains, where it gives its work to a device and runs ahead of it; all 0 where it computes itself.
  double host_step_ns = 0;   // its own work in an iteration with one part, blocks left out
  double host_part_ns = 0;   // for each part beyond the first
  double host_block_ns = 0;  // for each block
  std::string extra_json{};  // unknown fields of the JSON object, kept; "" if none

  bool operator==(const Profile&) const = default;
};

// Throws Error{kInvalidProfile} (or kInvalidLink) naming the first wrong field, e.g. "tensors[3].ready_ns is -1; …".
// Tensors of equal need may be in any order; otherwise need must not fall.
void check_profile(const Profile& profile);

// Brings tensors of equal need into urgency order. Readers do this; call it on profiles made by hand.
void sort_by_urgency(Profile& profile);

// JSON schema version 1; see docs/reference/file-formats.md. Reading checks, sorts by urgency and keeps unknown fields; writing rounds
// times to whole nanoseconds. `link` may be absent: the profile then has no network.
Profile profile_from_json(std::string_view text);
std::string to_json(const Profile& profile);

// Two links as JSON of their own: the value of the profile's field "link".
LinkModel link_from_json(std::string_view text);
std::string to_json(const LinkModel& link);

struct LayerTableOptions {
  std::string name = "profile";
  double scale = 1;  // multiplies every time: another batch size or device
  int32_t world_size = 1;
};
// A profile from a table of layers in forward order, CSV with the columns layer, forward_ms, backward_ms and
// parameter_bytes (others are ignored). A layer with parameters is one tensor: ready when its own backward has run
// (backward visits the layers in reverse), needed at the start of its own forward. Times are rounded to nanoseconds;
// elements are taken to be of 4 bytes, or 2 or 1 where some size is no multiple.
// Throws Error{kInvalidProfile} with the line and the column.
Profile profile_from_layer_table(std::string_view csv, const LayerTableOptions& options);

}  // namespace gradcast
