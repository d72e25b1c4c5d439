// torch asks these about its accelerator; they must be there before torch is.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
static int COUNT = std::getenv("MAKE_BELIEVE_GPUS") ? std::atoi(std::getenv("MAKE_BELIEVE_GPUS")) : 0;
static c10::DeviceIndex now() { return c10::impl::getDeviceGuardImpl(c10::kCUDA)->getDevice().index(); }
static void put(c10::DeviceIndex d) { c10::impl::getDeviceGuardImpl(c10::kCUDA)->setDevice({c10::kCUDA, d}); }
static at::Generator& default_generator() { static at::Generator g = at::make_generator<at::CPUGeneratorImpl>(1234); return g; }
struct FakeHooks final : at::CUDAHooksInterface {
  explicit FakeHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return COUNT; }
  int getNumGPUs() const override { return COUNT; }
  c10::DeviceIndex current_device() const override { return now(); }
  void setCurrentDevice(c10::DeviceIndex d) const override { put(d); }
  c10::DeviceIndex getCurrentDevice() const override { return now(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { auto o = now(); put(d); return o; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { auto o = now(); if (d >= 0) put(d); return o; }
  at::Device getDeviceFromPtr(void*) const override { return {c10::kCUDA, now()}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  std::string showConfig() const override { return "make-believe"; }
};
using at::CUDAHooksRegistry; using at::RegistererCUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", FakeHooks)

