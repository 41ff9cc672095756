#include "bench/place.h"

#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

namespace gradcast {
namespace {

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

std::map<std::string, std::string> nccl_environment() {
  std::map<std::string, std::string> found;
  for (char** each = environ; *each != nullptr; ++each) {
    const std::string entry = *each;
    if (const size_t end = entry.find('='); entry.starts_with("NCCL_") && end != std::string::npos) {
      found[entry.substr(0, end)] = entry.substr(end + 1);
    }
  }
  return found;
}

// Lines with the number of ranks that have them, in the order in which they come.
class Counts {
 public:
  void add(const std::string& line) {
    const auto found = std::ranges::find(counts_, line, &std::pair<std::string, size_t>::first);
    ++(found == counts_.end() ? counts_.emplace_back(line, 0) : *found).second;
  }
  const std::vector<std::pair<std::string, size_t>>& all() const { return counts_; }

 private:
  std::vector<std::pair<std::string, size_t>> counts_;
};

}  // namespace

std::vector<Place> places(Group& group) {
  using nlohmann::json;
  const json own = {host_name(), group.device(), group.libraries(), nccl_environment()};
  std::vector<Place> all;
  for (const std::string& text : group.gather_texts(own.dump(-1, ' ', false, json::error_handler_t::replace))) {
    const json each = json::parse(text);
    all.push_back({each[0], each[1], each[2], each[3]});
  }
  return all;
}

std::string places_text(const std::vector<Place>& places) {
  Counts hosts;
  Counts variables;
  for (const Place& place : places) {
    hosts.add(place.host + (place.device.empty() ? "" : ", " + place.device) +
              (place.libraries.empty() ? "" : ", " + place.libraries));
    for (const auto& [name, value] : place.environment) {
      variables.add(name + "=" + value);
    }
  }
  std::string text;
  for (const auto& [line, count] : hosts.all()) {
    text += "  " + std::to_string(count) + (count == 1 ? " rank on " : " ranks on ") + line + "\n";
  }
  for (const auto& [line, count] : variables.all()) {
    text += "  " + line + (count == places.size() ? "" : " on " + std::to_string(count) + " ranks only") + "\n";
  }
  return text;
}

}  // namespace gradcast
