// Who wants to know that a gradient exists: the engine, for hooks of autograd's in another module.
//
// Only plain data crosses this interface, as with transports (transport.h), and no exception does. Any change here
// changes kGradientSinkCapsule.
//
// Thread safety: any thread.
#pragma once

#include <cstdint>

namespace gradcast {

// The name of the Python capsule that hands a GradientSink* from the module with the engine to the one with the hooks.
inline constexpr const char* kGradientSinkCapsule = "gradcast.GradientSink.1";

class GradientSink {
 public:
  // Engine::on_ready. Returns false where that throws; calling it again throws the same error.
  virtual bool ready(int32_t tensor) noexcept = 0;

 protected:
  ~GradientSink() = default;
};

}  // namespace gradcast
