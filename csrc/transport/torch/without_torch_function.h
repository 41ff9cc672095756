// No Python for tensors that are pending (see pending.py), for as long as this object exists: code that uses one
// meanwhile gets the present value. Restores the former state.
//
// Thread safety: any thread; it holds for the one that makes it, which also has to end it.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>

namespace gradcast {

class WithoutTorchFunction {
 public:
  WithoutTorchFunction() : before_(Tls::get_disabled_state()) {
    if (before_ == at::impl::TorchFunctionDisabledState::ENABLED)
      Tls::set_disabled_state(at::impl::TorchFunctionDisabledState::SUBCLASSES_DISABLED);
  }
  ~WithoutTorchFunction() { Tls::set_disabled_state(before_); }
  WithoutTorchFunction(const WithoutTorchFunction&) = delete;
  WithoutTorchFunction& operator=(const WithoutTorchFunction&) = delete;

 private:
  using Tls = at::impl::PythonTorchFunctionTLS;
  const at::impl::TorchFunctionDisabledState before_;
};

}  // namespace gradcast
