// A make-believe CUDA device in host memory: every operation runs on the CPU at once; graphs are logs that are run again.
#include <torch/extension.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>
#include <atomic>
#include <mutex>
#include <unordered_map>

static int COUNT = std::getenv("MAKE_BELIEVE_GPUS") ? std::atoi(std::getenv("MAKE_BELIEVE_GPUS")) : 0;
static thread_local int current = 0;
static std::atomic<bool> is_capturing{false};
static std::atomic<int64_t> allocated{0}, peak{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device d) const override { auto old = current; if (d.index() >= 0) current = d.index(); return {c10::kCUDA, (c10::DeviceIndex)old}; }
  c10::Device getDevice() const override { return {c10::kCUDA, (c10::DeviceIndex)current}; }
  void setDevice(c10::Device d) const override { current = d.index(); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current = d.index(); }
  c10::Stream getStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getDefaultStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return c10::Stream(c10::Stream::DEFAULT, s.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override { *event = (void*)1; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

static void freed(void* context) {
  auto* block = (int64_t*)context;
  allocated -= *block;
  std::free(block);
}
struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    c10::Device device(c10::kCUDA, (c10::DeviceIndex)current);
    if (!size) return {nullptr, nullptr, &freed_nothing, device};
    size_t rounded = (size + 511) / 512 * 512;
    void* block = nullptr;
    if (posix_memalign(&block, 512, rounded + 512)) throw std::bad_alloc();
    *(int64_t*)block = rounded;
    auto now = allocated += rounded;
    for (auto p = peak.load(); p < now && !peak.compare_exchange_weak(p, now);) {}
    std::memset((char*)block + 512, is_capturing ? 0 : 0xff, rounded);  // what nobody wrote is NaN
    return {(char*)block + 512, block, &freed, device};
  }
  static void freed_nothing(void*) {}
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};
static Memory memory;
REGISTER_ALLOCATOR(c10::kCUDA, &memory)

// --- graphs
struct Entry { std::optional<c10::OperatorHandle> op; torch::jit::Stack in; std::vector<c10::IValue> out; std::function<void()> call; at::Generator drawer; };
struct Graph { std::vector<Entry> entries; };
static std::shared_ptr<Graph> capturing;  // one at a time, of any thread
static bool replaying = false;

static at::Generator& default_generator() {
  static at::Generator g = at::make_generator<at::CPUGeneratorImpl>(1234);
  return g;
}

static at::Tensor cpu_of(const at::Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  at::Tensor keep = t;
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  auto storage = c10::Storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(),
      c10::DataPtr(const_cast<void*>(t.storage().data()), new at::Tensor(t.detach()), [](void* p) { delete (at::Tensor*)p; }, at::kCPU), nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  return made;
}


static at::Tensor made_of(c10::IntArrayRef size, c10::IntArrayRef stride, c10::ScalarType dtype, std::optional<c10::Device> device) {
  auto old = current;
  if (device && device->index() >= 0) current = device->index();
  auto t = at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype);
  current = old;
  return t;
}
static at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto old = current;
  if (device && device->index() >= 0) current = device->index();
  auto t = at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())), format);
  current = old;
  return t;
}
static at::Tensor empty_strided_(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  return made_of(size, stride, dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())), device);
}

static at::Tensor snap(const at::Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  auto v = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(t.storage()), t.key_set(), t.dtype());
  v.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return v;
}
static void snap(std::vector<c10::IValue>& vs) {
  for (auto& v : vs) {
    if (v.isTensor()) v = snap(v.toTensor());
    else if (v.isTensorList()) { auto l = v.toTensorVector(); for (auto& t : l) t = snap(t); v = c10::List<at::Tensor>(l); }
    else if (v.isOptionalTensorList()) { c10::List<std::optional<at::Tensor>> l; for (std::optional<at::Tensor> t : v.toOptionalTensorList()) l.push_back(t ? std::optional<at::Tensor>(snap(*t)) : t); v = l; }
  }
}

static void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto n = schema.arguments().size();
  auto first = stack->size() - n;
  std::vector<c10::IValue> given(stack->begin() + first, stack->end());
  std::optional<c10::Device> device;
  std::vector<std::pair<at::Tensor, at::Tensor>> aliases;  // (ours, the CPU's)
  auto cpu = [&](const at::Tensor& t) {
    if (t.defined() && t.is_cuda()) {
      if (!device) device = t.device();
      auto a = cpu_of(t);
      aliases.emplace_back(t, a);
      return a;
    }
    return t;
  };
  bool any = false;
  for (size_t i = 0; i < n; i++) {
    auto& v = (*stack)[first + i];
    auto& arg = schema.arguments()[i];
    if (v.isTensor()) {
      auto t = v.toTensor();
      any |= t.defined() && t.is_cuda();
      if (arg.is_out() && t.defined() && t.is_cuda() && t.numel() == 0) {
        auto a = at::empty({0}, t.options().device(at::kCPU));
        aliases.emplace_back(t, a);
        if (!device) device = t.device();
        v = a;
      } else v = cpu(t);
    } else if (v.isTensorList()) {
      auto list = v.toTensorVector();
      for (auto& t : list) { any |= t.defined() && t.is_cuda(); t = cpu(t); }
      v = c10::List<at::Tensor>(list);
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (std::optional<at::Tensor> t : v.toOptionalTensorList()) list.push_back(t ? std::optional<at::Tensor>(cpu(*t)) : t);
      v = list;
    } else if (v.isDevice() && v.toDevice().is_cuda()) {
      device = v.toDevice(); v = c10::Device(c10::kCPU);
    }
  }
  auto& name = schema.name();
  bool mute = capturing && !replaying;
  TORCH_CHECK(!(mute && (name == "aten::_local_scalar_dense" || name == "aten::nonzero" || name == "aten::masked_select" || name == "aten::equal")), "operation not permitted when stream is capturing: ", name);
  bool writes = schema.is_mutable() && schema.returns().size() <= 1 || name.find("_foreach") != std::string::npos && name.back() == '_';
  bool grows = false;
  for (size_t i = 0; i < n; i++) if (schema.arguments()[i].is_out() && given[i].isTensor() && given[i].toTensor().numel() == 0) grows = true;
  if (mute && any && writes && !grows) {  // nothing runs while a graph is captured: what is written stays as it is
    stack->resize(first);
    for (auto& ret : schema.returns()) for (size_t i = 0; i < n; i++) {
      auto* a = schema.arguments()[i].alias_info();
      if (a && ret.alias_info() && a->isWrite() && a->beforeSet() == ret.alias_info()->beforeSet()) { stack->push_back(given[i]); break; }
    }
    Entry e; e.op = op; e.in = given; e.drawer = default_generator();
    e.out.assign(stack->begin() + first, stack->end());
    snap(e.in); snap(e.out); capturing->entries.push_back(std::move(e));
    return;
  }
  bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  if (draws) {
    auto host = at::detail::getDefaultCPUGenerator();
    auto drawer = default_generator();
    auto saved = host.get_state();
    host.set_state(drawer.get_state());
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    drawer.set_state(host.get_state());
    host.set_state(saved);
  } else op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  auto r = schema.returns().size();
  auto back = stack->size() - r;
  for (auto& [ours, theirs] : aliases)
    if (!ours.sizes().equals(theirs.sizes())) {
      ours.unsafeGetTensorImpl();
      auto fresh = made_of(theirs.sizes(), theirs.strides(), ours.scalar_type(), ours.device());
      cpu_of(fresh).copy_(theirs);
      auto o = ours;
      o.unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
      o.unsafeGetTensorImpl()->set_sizes_and_strides(theirs.sizes(), theirs.strides(), 0);
    }
  auto gpu = [&](const at::Tensor& t) -> at::Tensor {
    if (!t.defined() || !t.device().is_cpu()) return t;
    for (auto& [ours, theirs] : aliases) if (theirs.is_same(t)) return ours;
    for (auto& [ours, theirs] : aliases)
      if (t.has_storage() && t.storage().unsafeGetStorageImpl() == theirs.storage().unsafeGetStorageImpl()) {
        auto v = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(ours.storage()), c10::DispatchKeySet(c10::DispatchKey::CUDA), t.dtype());
        v.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
        return v;
      }
    auto fresh = made_of(t.sizes(), t.strides(), t.scalar_type(), device);
    cpu_of(fresh).copy_(t);
    return fresh;
  };
  for (size_t i = 0; i < r; i++) {
    auto& v = (*stack)[back + i];
    if (v.isTensor() && device) v = gpu(v.toTensor());
    else if (v.isTensorList() && device) {
      auto list = v.toTensorVector();
      for (auto& t : list) t = gpu(t);
      v = c10::List<at::Tensor>(list);
    }
  }
  if (capturing && !replaying) {
    Entry e; e.op = op; e.in = given; e.drawer = default_generator();
    e.out.assign(stack->begin() + back, stack->end());
    snap(e.in); snap(e.out); capturing->entries.push_back(std::move(e));
  }
}

static void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) { run(op, stack); }

static at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  if (!(capturing && !replaying)) { auto a = cpu_of(self); a.copy_(cpu_of(src)); }
  if (capturing && !replaying) {
    TORCH_CHECK(!self.is_cpu() || non_blocking, "operation not permitted when stream is capturing: copy to the host");
    Entry e; e.op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    e.in = {self, src, non_blocking}; e.out = {self}; e.drawer = default_generator();
    snap(e.in); snap(e.out); capturing->entries.push_back(std::move(e));
  }
  return self;
}
static at::Tensor strided_of(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  auto v = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  v.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return v;
}
static at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) {
  auto v = cpu_of(self).view(size);
  return strided_of(self, v.sizes(), v.strides(), self.storage_offset());
}
static at::Tensor view_dtype(const at::Tensor& self, at::ScalarType type) {
  auto v = cpu_of(self).view(type);
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), v.dtype());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(v.sizes(), v.strides(), v.storage_offset());
  return t;
}
static const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto need = (size_t)(c10::multiply_integers(size) + self.storage_offset()) * self.itemsize();
  if (self.storage().nbytes() < need) {
    auto ptr = memory.allocate(need);
    if (self.storage().nbytes()) std::memcpy(ptr.get(), self.storage().data(), self.storage().nbytes());
    self.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(ptr));
    self.storage().unsafeGetStorageImpl()->set_nbytes(need);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}
static at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  auto s = stride.vec();
  if (s.empty() && !size.empty()) { s.resize(size.size()); int64_t k = 1; for (int i = size.size(); i--;) { s[i] = k; k *= std::max<int64_t>(size[i], 1); } }
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, s, offset);
  return self;
}
static at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) { return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides()); }
static at::Tensor reshape_alias(const at::Tensor& t, c10::IntArrayRef a, c10::IntArrayRef b) { return strided_of(t, a, b, std::nullopt); }
static at::Tensor& set_whole(at::Tensor& self, at::Storage s) { return set_storage(self, s, 0, {(int64_t)(s.nbytes() / self.itemsize())}, {}); }
static void record_stream(at::Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided_);
  m.impl("copy_", copy_);
  m.impl("as_strided", strided_of);
  m.impl("view", view);
  m.impl("view.dtype", view_dtype);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_whole);
  m.impl("record_stream", record_stream);
}

// --- NCCL in gloo's clothes
namespace c10d {
static std::vector<at::Tensor> all(std::vector<at::Tensor>& ts) { std::vector<at::Tensor> o; for (auto& t : ts) o.push_back(cpu_of(t)); return o; }
static std::vector<std::vector<at::Tensor>> all(std::vector<std::vector<at::Tensor>>& ts) { std::vector<std::vector<at::Tensor>> o; for (auto& t : ts) o.push_back(all(t)); return o; }
struct Done : Work { bool isCompleted() override { return true; } bool wait(std::chrono::milliseconds) override { return true; } void synchronize() override {} c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { auto f = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors()); f->markCompleted(c10::IValue(c10::List<at::Tensor>())); return f; } };
struct Fake : Backend {
  c10::intrusive_ptr<Backend> inner;
  Fake(c10::intrusive_ptr<Backend> in, int rank, int size) : Backend(rank, size), inner(std::move(in)) {}
  const std::string getBackendName() const override { return "nccl"; }
  using W = c10::intrusive_ptr<Work>;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void startCoalescing() override {}
  W endCoalescing() override { return c10::make_intrusive<Done>(); }
  template <class Fn> W did(Fn call) {
    if (capturing && !replaying) { Entry e; e.call = [call]() mutable { call()->wait(); }; snap(e.in); snap(e.out); capturing->entries.push_back(std::move(e)); return c10::make_intrusive<Done>(); }
    return call();
  }
  W broadcast(std::vector<at::Tensor>& t, const BroadcastOptions& o) override { auto a = all(t); return did([=, this]() mutable { return inner->broadcast(a, o); }); }
  W allreduce(std::vector<at::Tensor>& t, const AllreduceOptions& o) override { auto a = all(t); return did([=, this]() mutable { return inner->allreduce(a, o); }); }
  W allreduce_coalesced(std::vector<at::Tensor>& t, const AllreduceCoalescedOptions& o) override { auto a = all(t); return did([=, this]() mutable { return inner->allreduce_coalesced(a, o); }); }
  W reduce(std::vector<at::Tensor>& t, const ReduceOptions& o) override { auto a = all(t); return did([=, this]() mutable { return inner->reduce(a, o); }); }
  W allgather(std::vector<std::vector<at::Tensor>>& out, std::vector<at::Tensor>& in, const AllgatherOptions& o) override { auto a = all(out); auto b = all(in); return did([=, this]() mutable { return inner->allgather(a, b, o); }); }
  W _allgather_base(at::Tensor& out, at::Tensor& in, const AllgatherOptions& o) override { auto a = cpu_of(out), b = cpu_of(in); return did([=, this]() mutable { return inner->_allgather_base(a, b, o); }); }
  W reduce_scatter(std::vector<at::Tensor>& out, std::vector<std::vector<at::Tensor>>& in, const ReduceScatterOptions& o) override { auto a = all(out); auto b = all(in); return did([=, this]() mutable { return inner->reduce_scatter(a, b, o); }); }
  W _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const ReduceScatterOptions& o) override { auto a = cpu_of(out), b = cpu_of(in); return did([=, this]() mutable { return inner->_reduce_scatter_base(a, b, o); }); }
  W alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& x, std::vector<int64_t>& y, const AllToAllOptions& o) override { auto a = cpu_of(out), b = cpu_of(in); return did([=, this]() mutable { return inner->alltoall_base(a, b, x, y, o); }); }
  W alltoall(std::vector<at::Tensor>& out, std::vector<at::Tensor>& in, const AllToAllOptions& o) override { auto a = all(out); auto b = all(in); return did([=, this]() mutable { return inner->alltoall(a, b, o); }); }
  W gather(std::vector<std::vector<at::Tensor>>& out, std::vector<at::Tensor>& in, const GatherOptions& o) override { auto a = all(out); auto b = all(in); return did([=, this]() mutable { return inner->gather(a, b, o); }); }
  W scatter(std::vector<at::Tensor>& out, std::vector<std::vector<at::Tensor>>& in, const ScatterOptions& o) override { auto a = all(out); auto b = all(in); return did([=, this]() mutable { return inner->scatter(a, b, o); }); }
  W send(std::vector<at::Tensor>& t, int to, int tag) override { auto a = all(t); return did([=, this]() mutable -> W { auto w = inner->send(a, to, tag); if (!replaying) return w; pending().push_back(w); return c10::make_intrusive<Done>(); }); }
  static std::vector<W>& pending() { static std::vector<W> p; return p; }
  W recv(std::vector<at::Tensor>& t, int from, int tag) override { auto a = all(t); return did([=, this]() mutable { auto w = inner->recv(a, from, tag); return w; }); }
  W allgather_into_tensor_coalesced(std::vector<at::Tensor>& out, std::vector<at::Tensor>& in, const AllgatherOptions& o) override { for (size_t i = 0; i < out.size(); i++) _allgather_base(out[i], in[i], o)->wait(); return c10::make_intrusive<Done>(); }
  W reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& out, std::vector<at::Tensor>& in, const ReduceScatterOptions& o) override { for (size_t i = 0; i < out.size(); i++) _reduce_scatter_base(out[i], in[i], o)->wait(); return c10::make_intrusive<Done>(); }
  W barrier(const BarrierOptions& o) override { BarrierOptions b = o; b.device_ids.clear(); b.device.reset(); return inner->barrier(b); }
};
}

static void replay(std::shared_ptr<Graph> g) {
  at::NoGradGuard no;
  at::AutoDispatchBelowADInplaceOrView below;
  replaying = true;
  for (auto& e : g->entries) {
    if (!e.op) { e.call(); continue; }
    auto before = default_generator();
    struct Back { at::Generator g; ~Back() { default_generator() = g; } } back{before};
    default_generator() = e.drawer;
    torch::jit::Stack stack = e.in;
    if (e.op->schema().name() == "aten::copy_") { auto d = stack[0].toTensor(); cpu_of(d).copy_(cpu_of(stack[1].toTensor())); continue; }
    run(*e.op, &stack);
    for (size_t i = 0; i < e.out.size(); i++) {
      auto put = [](const at::Tensor& into, const at::Tensor& from) {
        if (into.defined() && !into.is_same(from) && into.data_ptr() != from.data_ptr()) cpu_of(into).copy_(cpu_of(from));
      };
      if (e.out[i].isTensor()) put(e.out[i].toTensor(), stack[i].toTensor());
      else if (e.out[i].isTensorList()) { auto a = e.out[i].toTensorVector(), b = stack[i].toTensorVector(); for (size_t k = 0; k < a.size(); k++) put(a[k], b[k]); }
    }
  }
  replaying = false;
  for (auto& w : c10d::Fake::pending()) w->wait();
  c10d::Fake::pending().clear();
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph").def(py::init<>()).def("size", [](Graph& g) { return g.entries.size(); }).def("replay", [](std::shared_ptr<Graph> g) { py::gil_scoped_release r; replay(g); });
  m.def("begin", [](std::shared_ptr<Graph> g) { capturing = g; is_capturing = true; });
  m.def("end", [] { capturing = nullptr; is_capturing = false; });
  m.def("is_capturing", [] { return (bool)capturing; });
  m.def("is_replaying", [] { return replaying; });
  m.def("log", [](py::object call) { if (capturing && !replaying) { Entry e; e.call = [call] { py::gil_scoped_acquire g; call(); }; snap(e.in); snap(e.out); capturing->entries.push_back(std::move(e)); } });
  m.def("allocated", [] { return allocated.load(); });
  m.def("peak", [] { return peak.load(); });
  m.def("reset_peak", [] { peak = allocated.load(); });
  m.def("set_device", [](int d) { current = d; });
  m.def("device", [] { return current; });
  m.def("get_default", [] { return default_generator(); });
  m.def("set_default", [](at::Generator g) { default_generator() = g; });
  m.def("alias", [](at::Tensor t) { return cpu_of(t); });
  py::class_<c10d::Fake, c10::intrusive_ptr<c10d::Fake>, c10d::Backend>(m, "Fake").def(py::init([](c10::intrusive_ptr<c10d::Backend> in, int r, int s) { return c10::make_intrusive<c10d::Fake>(in, r, s); }));
}
