// What torch asks about its accelerator, which must be there before torch is.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

static const c10::DeviceIndex COUNT = std::getenv("MAKE_BELIEVE_GPUS") ? std::atoi(std::getenv("MAKE_BELIEVE_GPUS")) : 0;

static const c10::impl::DeviceGuardImplInterface& guard() { return *c10::impl::getDeviceGuardImpl(c10::kCUDA); }

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return COUNT; }
  int getNumGPUs() const override { return COUNT; }
  c10::DeviceIndex current_device() const override { return guard().getDevice().index(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex number) const override { guard().setDevice({c10::kCUDA, number}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex number) const override {
    return guard().exchangeDevice({c10::kCUDA, number}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex number) const override { return exchangeDevice(number); }
  at::Device getDeviceFromPtr(void*) const override { return guard().getDevice(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  std::string showConfig() const override { return "make-believe"; }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks)
