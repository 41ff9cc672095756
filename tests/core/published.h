// The published layer tables that the package carries, as text.
//
// Thread safety: any thread.
#pragma once

#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>

namespace gradcast {

// `model`: "resnet50" or "vgg16".
inline std::string published_layers(const std::string& model) {
  const std::string path = std::string(GRADCAST_DATA_DIR) + "/layers_" + model + ".csv";
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  if (text.str().empty()) {
    throw std::runtime_error("cannot read " + path);
  }
  return text.str();
}

}  // namespace gradcast
