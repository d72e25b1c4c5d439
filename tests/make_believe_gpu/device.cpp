// A make-believe CUDA device in host memory. Every operation runs on the CPU at once, on tensors that share the memory
// (`cpu_of`). A graph is a log of what was called while it was captured; a replay calls it all again, into the same memory.
#include <torch/extension.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <atomic>
#include <functional>

#include "waits.h"

using at::Tensor;
using c10::IntArrayRef;
using c10::IValue;
using c10::TensorImpl;
using torch::jit::Stack;

// --- Devices and streams: there is one thing to do at a time, but `waits` knows what could be done beside it ---

static const int COUNT = std::getenv("MAKE_BELIEVE_GPUS") ? std::atoi(std::getenv("MAKE_BELIEVE_GPUS")) : 0;
static thread_local c10::DeviceIndex current = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(c10::Device d, waits::Stream id) { return c10::Stream(c10::Stream::UNSAFE, d, id); }

  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device getDevice() const override { return {c10::kCUDA, current}; }
  void setDevice(c10::Device d) const override { current = d.index(); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current = d.index(); }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto before = getDevice();
    if (d.index() >= 0) current = d.index();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }
  c10::Stream getStream(c10::Device d) const override { return stream(d, waits::current); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(d, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return stream(d, waits::new_stream()); }
  c10::Stream getNewStream(c10::Device d, int) const override { return stream(d, waits::new_stream()); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = stream(s.device(), waits::current);
    waits::current = s.id();
    return before;
  }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new waits::Moment;
    *static_cast<waits::Moment*>(*event) = waits::record(s.id());
  }
  void block(void* event, const c10::Stream& s) const override { waits::wait(s.id(), *static_cast<waits::Moment*>(event)); }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<waits::Moment*>(event); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& s) const override { waits::hear(waits::record(s.id()).clock, true); }
  void synchronizeEvent(void* event) const override { waits::hear(static_cast<waits::Moment*>(event)->clock, true); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    waits::record_stream(reinterpret_cast<uintptr_t>(data.get()), s.id());
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// --- Graphs ---

// Of the device; a graph's replay puts the one in place that drew at the capture.
static at::Generator& drawer() {
  static at::Generator one = at::make_generator<at::CPUGeneratorImpl>(1234);
  return one;
}

// What was called: an operation with what it got and made, or else any function.
struct Call {
  std::optional<c10::OperatorHandle> operation;
  Stack given;
  std::vector<IValue> made;
  at::Generator drawer;
  std::function<void()> function;
};

struct Graph {
  std::set<const void*> communicators, generators;  // that it sends over, and draws from
  std::vector<Call> calls;
  std::vector<waits::Use> uses;
};

static std::shared_ptr<Graph> graph;  // that is captured: one at a time, by any thread
static bool replaying = false;

static bool capturing() { return graph && !replaying; }

// --- Memory: what nobody wrote is NaN, but 0 while a graph is captured, where numbers are those of no run ---

static std::atomic<int64_t> allocated{0}, peak{0};
static constexpr size_t UNIT = 512;  // bytes, as torch's allocator rounds; the first ones of a block say its size

struct Memory final : c10::Allocator {
  static void free_block(void* block) {
    waits::give_back(reinterpret_cast<uintptr_t>(block) + UNIT);
    allocated -= *static_cast<int64_t*>(block);
    std::free(block);
  }
  static void free_nothing(void*) {}

  c10::DataPtr allocate(size_t size) override {
    c10::Device device(c10::kCUDA, current);
    if (!size) return {nullptr, nullptr, &free_nothing, device};
    int64_t rounded = (size + UNIT - 1) / UNIT * UNIT;
    void* block = nullptr;
    if (posix_memalign(&block, UNIT, rounded + UNIT)) throw std::bad_alloc();
    *static_cast<int64_t*>(block) = rounded;
    auto now = allocated += rounded;
    for (auto most = peak.load(); most < now && !peak.compare_exchange_weak(most, now);) {
    }
    auto data = static_cast<char*>(block) + UNIT;
    std::memset(data, capturing() ? 0 : 0xff, rounded);
    waits::take(reinterpret_cast<uintptr_t>(data), rounded);
    return {data, block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};
static Memory memory;
REGISTER_ALLOCATOR(c10::kCUDA, &memory)

static const c10::DispatchKeySet CUDA(c10::DispatchKey::CUDA), CPU(c10::DispatchKey::CPU);

// A tensor of a storage, with all that says where its numbers lie.
static Tensor tensor_of(c10::Storage storage, c10::DispatchKeySet keys, caffe2::TypeMeta type, IntArrayRef size,
                        IntArrayRef stride, int64_t offset) {
  auto made = at::detail::make_tensor<TensorImpl>(std::move(storage), keys, type);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return made;
}

// The CPU's tensor with the same memory, which it keeps.
static Tensor cpu_of(const Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  auto keep = new Tensor(t.detach());
  c10::DataPtr data(const_cast<void*>(t.storage().data()), keep, [](void* one) { delete static_cast<Tensor*>(one); }, at::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(data), nullptr, false);
  auto made = tensor_of(std::move(storage), CPU, t.dtype(), t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  return made;
}

// The same view of the same storage: tensors change, whose storage a log has to know as it was.
static Tensor as_now(const Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  return tensor_of(c10::Storage(t.storage()), t.key_set(), t.dtype(), t.sizes(), t.strides(), t.storage_offset());
}

// `change` of all tensors in a value.
template <class Change>
static IValue each_tensor(const IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    auto list = value.toTensorVector();
    for (auto& t : list) t = change(t);
    return c10::List<Tensor>(list);
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (std::optional<Tensor> t : value.toOptionalTensorList()) list.push_back(t ? std::optional<Tensor>(change(*t)) : t);
    return list;
  }
  return value;
}

static void log(Call call) {
  for (auto& value : call.given) value = each_tensor(value, as_now);
  for (auto& value : call.made) value = each_tensor(value, as_now);
  graph->calls.push_back(std::move(call));
}

// --- Tensors ---

// Makes what `make` makes, on a device.
template <class Make>
static Tensor made_on(std::optional<c10::Device> device, Make make) {
  auto before = current;
  if (device && device->index() >= 0) current = device->index();
  auto made = make();
  current = before;
  return made;
}

static c10::ScalarType type_of(std::optional<at::ScalarType> said) {
  return said.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
}

static Tensor strided_room(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                            std::optional<at::Device> device, std::optional<bool>) {
  return made_on(device, [&] { return at::detail::empty_strided_generic(size, stride, &memory, CUDA, type_of(type)); });
}

static Tensor room(IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return made_on(device, [&] { return at::detail::empty_generic(size, &memory, CUDA, type_of(type), format); });
}

// A tensor's bytes are used on a stream; those of the host only where they are pinned.
static void use(const Tensor& t, bool write, waits::Stream stream, const std::string& what) {
  if (!t.defined() || !t.has_storage() || !t.numel()) return;
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); i++) last += (t.size(i) - 1) * t.stride(i);
  waits::use_now(reinterpret_cast<uintptr_t>(t.const_data_ptr()), (last + 1) * t.itemsize(), write, stream, what);
}

// Raises what is wrong.
static void check_waits() {
  auto text = waits::found();
  TORCH_CHECK(text.empty(), text);
}

// A tensor on the device with the numbers of one of the CPU.
static Tensor copied(const Tensor& t, std::optional<c10::Device> device) {
  auto made = strided_room(t.sizes(), t.strides(), t.scalar_type(), std::nullopt, device, std::nullopt);
  cpu_of(made).copy_(t);
  return made;
}

static Tensor strided_view(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  auto made = at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return made;
}

static Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return strided_view(self, size, stride, std::nullopt);
}

static Tensor view(const Tensor& self, IntArrayRef size) {
  auto seen = cpu_of(self).view(size);
  return strided_view(self, seen.sizes(), seen.strides(), std::nullopt);
}

static Tensor view_of_type(const Tensor& self, at::ScalarType type) {
  auto seen = cpu_of(self).view(type);
  auto made = at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), seen.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(seen.sizes(), seen.strides(), seen.storage_offset());
  return made;
}

static const Tensor& resize(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto storage = self.storage().unsafeGetStorageImpl();
  size_t need = (c10::multiply_integers(size) + self.storage_offset()) * self.itemsize();
  if (storage->nbytes() < need) {
    auto data = memory.allocate(need);
    if (storage->nbytes()) std::memcpy(data.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(need);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

static Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  if (stride.size() == size.size()) self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  else {
    self.unsafeGetTensorImpl()->set_storage_offset(offset);
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  }
  return self;
}

static Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  int64_t count = source.nbytes() / self.itemsize();
  return set_storage(self, source, 0, {count}, {});
}

static Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

static Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  {
    waits::Locked here(waits::lock);
    waits::launch(waits::current, "a copy");
    use(source, false, waits::current, "a copy");
    use(self, true, waits::current, "a copy");
    if (self.is_cpu() && !non_blocking) waits::hear(waits::streams[waits::current], true);
  }
  check_waits();
  if (!capturing()) {
    cpu_of(self).copy_(cpu_of(source));
    return self;
  }
  const auto& host = self.is_cpu() ? self : source;
  TORCH_CHECK(!host.is_cpu() || (non_blocking && waits::is_pinned(reinterpret_cast<uintptr_t>(host.const_data_ptr()))),
              "operation not permitted when stream is capturing: a copy of memory that is not pinned, or with a wait");
  auto operation = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  log({operation, {self, source, non_blocking}, {self}, drawer(), nullptr});
  return self;
}

static void record_stream(Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", room);
  m.impl("empty_strided", strided_room);
  m.impl("copy_", copy);
  m.impl("as_strided", strided_view);
  m.impl("view", view);
  m.impl("view.dtype", view_of_type);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("record_stream", record_stream);
}

// --- All other operations ---

// What an operation gets and makes, between the device and the CPU.
struct Between {
  std::optional<c10::Device> device;
  std::vector<std::pair<Tensor, Tensor>> both;  // the device's tensor, the CPU's

  IValue down(const IValue& value, bool out) {
    if (value.isDevice() && value.toDevice().is_cuda()) {
      device = value.toDevice();
      return c10::Device(c10::kCPU);
    }
    return each_tensor(value, [&](const Tensor& t) {
      if (!t.defined() || !t.is_cuda()) return t;
      if (!device) device = t.device();
      // Memory that another owns does not grow: what is empty gets its own.
      auto lower = out && t.numel() == 0 ? at::empty({0}, t.options().device(at::kCPU)) : cpu_of(t);
      both.emplace_back(t, lower);
      return lower;
    });
  }

  // Outputs that the operation has made larger.
  void grow() {
    for (auto& [upper, lower] : both) {
      if (upper.sizes().equals(lower.sizes())) continue;
      auto made = copied(lower, upper.device());
      upper.unsafeGetTensorImpl()->set_storage_keep_dtype(made.storage());
      upper.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides(), 0);
    }
  }

  Tensor up(const Tensor& t) const {
    if (!t.defined() || !t.device().is_cpu()) return t;
    for (auto& [upper, lower] : both)
      if (lower.is_same(t)) return upper;
    for (auto& [upper, lower] : both)  // a view
      if (t.has_storage() && t.storage().unsafeGetStorageImpl() == lower.storage().unsafeGetStorageImpl())
        return tensor_of(c10::Storage(upper.storage()), CUDA, t.dtype(), t.sizes(), t.strides(), t.storage_offset());
    return copied(t, device);
  }
};

// Random numbers come from the device's generator, which no operation on a GPU takes from the host.
static void run_on_cpu(const c10::OperatorHandle& operation, Stack* stack) {
  if (!operation.hasTag(at::Tag::nondeterministic_seeded)) {
    operation.redispatchBoxed(CPU, stack);
    return;
  }
  auto host = at::detail::getDefaultCPUGenerator(), own = drawer();
  TORCH_CHECK(!capturing() || graph->generators.count(own.unsafeGetGeneratorImpl()), "a graph draws from a generator that ",
              "was not registered with it");
  auto before = host.get_state();
  host.set_state(own.get_state());
  operation.redispatchBoxed(CPU, stack);
  own.set_state(host.get_state());
  host.set_state(before);
}

// Does it write into what it gets, and make nothing else?
static bool writes(const c10::FunctionSchema& schema) {
  bool many = schema.name().find("_foreach") != std::string::npos && schema.name().back() == '_';
  return many || (schema.is_mutable() && schema.returns().size() <= 1);
}

// What such an operation returns.
static std::vector<IValue> written(const c10::FunctionSchema& schema, const Stack& given) {
  std::vector<IValue> found;
  for (auto& result : schema.returns())
    for (size_t i = 0; i < given.size(); i++) {
      auto alias = schema.arguments()[i].alias_info();
      if (alias && result.alias_info() && alias->isWrite() && alias->beforeSet() == result.alias_info()->beforeSet()) {
        found.push_back(given[i]);
        break;
      }
    }
  return found;
}

// What an operation is given or has made, where some of it is on the device: used on the current stream.
static void use_all(const std::vector<std::pair<IValue, bool>>& values, const std::string& name) {
  waits::Locked here(waits::lock);
  waits::launch(waits::current, name);
  for (auto& [value, write] : values)
    each_tensor(value, [&, writes = write](const Tensor& t) {
      if (t.defined() && t.is_cuda()) use(t, writes, waits::current, name);
      return t;
    });
}

static bool looks(const std::string& name) {
  for (auto looking : {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"})
    if (name == looking) return true;
  return false;
}

static void run(const c10::OperatorHandle& operation, Stack* stack) {
  const auto& schema = operation.schema();
  auto count = schema.arguments().size(), first = stack->size() - count;
  Stack given(stack->begin() + first, stack->end());
  TORCH_CHECK(!capturing() || !looks(schema.name()), "operation not permitted when stream is capturing: ", schema.name());
  if (!replaying) {
    std::vector<std::pair<IValue, bool>> values;
    for (size_t i = 0; i < count; i++) {
      auto alias = schema.arguments()[i].alias_info();
      values.emplace_back(given[i], alias && alias->isWrite());
    }
    use_all(values, schema.name());
    if (looks(schema.name())) waits::hear(waits::record(waits::current).clock, true);
    check_waits();
  }
  Between between;
  bool grows = false;
  for (size_t i = 0; i < count; i++) {
    bool out = schema.arguments()[i].is_out();
    grows |= out && given[i].isTensor() && given[i].toTensor().numel() == 0;
    (*stack)[first + i] = between.down(given[i], out);
  }
  if (capturing() && between.both.size() && writes(schema) && !grows) {  // a capture runs nothing: all stays as it is
    stack->resize(first);
    for (auto& value : written(schema, given)) stack->push_back(value);
  } else {
    run_on_cpu(operation, stack);
    between.grow();
    for (size_t i = first; i < stack->size(); i++)
      if (between.device) (*stack)[i] = each_tensor((*stack)[i], [&](const Tensor& t) { return between.up(t); });
  }
  if (!replaying) {
    std::vector<std::pair<IValue, bool>> fresh;
    for (size_t i = first; i < stack->size(); i++) {
      auto alias = schema.returns()[i - first].alias_info();
      if (!alias) fresh.emplace_back((*stack)[i], true);
    }
    use_all(fresh, schema.name());
  }
  if (capturing()) log({operation, given, {stack->begin() + first, stack->end()}, drawer(), nullptr});
}

static void fallback(const c10::OperatorHandle& operation, c10::DispatchKeySet, Stack* stack) { run(operation, stack); }
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// --- NCCL in gloo's clothes ---

namespace c10d {

using Works = c10::intrusive_ptr<Work>;

// What a communicator does on a stream of its own. Whoever waits lets the current stream wait.
struct Launched : Work {
  Works work;
  waits::Moment end;

  Launched(Works work, waits::Moment end) : work(std::move(work)), end(std::move(end)) {}
  bool isCompleted() override { return !work || work->isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override {
    waits::wait(waits::current, end);
    if (timeout != kNoTimeout) waits::hear(end.clock, false);
    return !work || work->wait(timeout);
  }
  void synchronize() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return work->getFuture(); }
};

static std::vector<Tensor> down(std::vector<Tensor>& many) {
  std::vector<Tensor> found;
  for (auto& t : many) found.push_back(cpu_of(t));
  return found;
}

static std::vector<std::vector<Tensor>> down(std::vector<std::vector<Tensor>>& many) {
  std::vector<std::vector<Tensor>> found;
  for (auto& row : many) found.push_back(down(row));
  return found;
}

static Tensor down(Tensor& t) { return cpu_of(t); }

using Row = std::vector<Tensor>;
using Rows = std::vector<Row>;
static Row flat(const Tensor& t) { return {t}; }
static Row flat(const Row& row) { return row; }
static Row flat(const Rows& rows) {
  Row found;
  for (auto& row : rows) found.insert(found.end(), row.begin(), row.end());
  return found;
}

static auto& in_pass = *new py::function;  // never freed, as Python ends before; the name of the pass that this thread runs, or ""

struct Nccl : Backend {
  c10::intrusive_ptr<Backend> gloo;
  bool used = false;
  waits::Stream stream = waits::new_stream();
  static std::vector<Works>& sent() {  // by a replay, whose end waits: another rank may be at its own sends
    static std::vector<Works> works;
    return works;
  }

  Nccl(c10::intrusive_ptr<Backend> gloo, int rank, int size) : Backend(rank, size), gloo(std::move(gloo)) {}
  const std::string getBackendName() const override { return "nccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void startCoalescing() override {}
  Works endCoalescing() override { return c10::make_intrusive<Launched>(nullptr, waits::Moment()); }

  // Run it, or put it into the graph: on the communicator's stream, behind what is launched on the current one.
  template <class Function>
  Works did(Function function, const Row& read, const Row& written, const std::string& what) {
    if (!used) {
      py::gil_scoped_acquire mine;
      auto pass = in_pass().template cast<std::string>();
      TORCH_CHECK(pass.empty(), "a communicator is made in the middle of a step, by pass ", pass);
    }
    used = true;
    waits::Moment end;
    {
      waits::Locked here(waits::lock);
      waits::wait(stream, waits::record(waits::current));
      waits::launch(stream, what);
      for (auto& t : read) use(t, false, stream, what);
      for (auto& t : written) use(t, true, stream, what);
      end = waits::record(stream);
    }
    check_waits();
    if (!capturing()) return c10::make_intrusive<Launched>(function(), end);
    graph->communicators.insert(this);
    log({std::nullopt, {}, {}, drawer(), [function]() mutable { function()->wait(); }});
    return c10::make_intrusive<Launched>(nullptr, end);
  }

  template <class Way, class One, class Options>
  Works of_one(Way way, One& one, const Options& options, const std::string& what) {
    return did([=, this, a = down(one)]() mutable { return (gloo.get()->*way)(a, options); }, {}, flat(one), what);
  }

  template <class Way, class Out, class In, class Options>
  Works of_two(Way way, Out& out, In& in, const Options& options, const std::string& what) {
    auto function = [=, this, a = down(out), b = down(in)]() mutable { return (gloo.get()->*way)(a, b, options); };
    return did(function, flat(in), flat(out), what);
  }

  Works broadcast(Row& row, const BroadcastOptions& o) override { return of_one(&Backend::broadcast, row, o, "broadcast"); }
  Works allreduce(Row& row, const AllreduceOptions& o) override { return of_one(&Backend::allreduce, row, o, "allreduce"); }
  Works reduce(Row& row, const ReduceOptions& o) override { return of_one(&Backend::reduce, row, o, "reduce"); }
  Works allgather(Rows& out, Row& in, const AllgatherOptions& o) override { return of_two(&Backend::allgather, out, in, o, "allgather"); }
  Works _allgather_base(Tensor& out, Tensor& in, const AllgatherOptions& o) override {
    return of_two(&Backend::_allgather_base, out, in, o, "_allgather_base");
  }
  Works reduce_scatter(Row& out, Rows& in, const ReduceScatterOptions& o) override {
    return of_two(&Backend::reduce_scatter, out, in, o, "reduce_scatter");
  }
  Works _reduce_scatter_base(Tensor& out, Tensor& in, const ReduceScatterOptions& o) override {
    return of_two(&Backend::_reduce_scatter_base, out, in, o, "_reduce_scatter_base");
  }
  Works alltoall(Row& out, Row& in, const AllToAllOptions& o) override { return of_two(&Backend::alltoall, out, in, o, "alltoall"); }
  Works gather(Rows& out, Row& in, const GatherOptions& o) override { return of_two(&Backend::gather, out, in, o, "gather"); }
  Works scatter(Row& out, Rows& in, const ScatterOptions& o) override { return of_two(&Backend::scatter, out, in, o, "scatter"); }
  Works alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& outs, std::vector<int64_t>& ins,
                      const AllToAllOptions& o) override {
    auto function = [=, this, a = down(out), b = down(in)]() mutable { return gloo->alltoall_base(a, b, outs, ins, o); };
    return did(function, {in}, {out}, "alltoall");
  }
  Works allgather_into_tensor_coalesced(Row& out, Row& in, const AllgatherOptions& o) override {
    for (size_t i = 0; i < out.size(); i++) _allgather_base(out[i], in[i], o)->wait();
    return c10::make_intrusive<Launched>(nullptr, waits::Moment());
  }
  Works send(Row& row, int to, int tag) override {
    auto function = [=, this, a = down(row)]() mutable -> Works {
      auto work = gloo->send(a, to, tag);
      if (!replaying) return work;
      sent().push_back(work);
      return c10::make_intrusive<Launched>(nullptr, waits::Moment());
    };
    return did(function, row, {}, "a send");
  }
  Works recv(Row& row, int from, int tag) override {
    return did([=, this, a = down(row)]() mutable { return gloo->recv(a, from, tag); }, {}, row, "a receive");
  }
  Works barrier(const BarrierOptions& given) override {
    BarrierOptions options = given;
    options.device_ids.clear();
    options.device.reset();
    return gloo->barrier(options);
  }
};

}  // namespace c10d

// --- Replays ---

static void put(const Tensor& into, const Tensor& from) {
  if (into.defined() && into.data_ptr() != from.data_ptr()) cpu_of(into).copy_(cpu_of(from));
}

static void repeat(const Call& call) {
  if (!call.operation) return call.function();
  drawer() = call.drawer;
  Stack stack = call.given;
  if (call.operation->schema().name() == "aten::copy_") {
    cpu_of(stack[0].toTensor()).copy_(cpu_of(stack[1].toTensor()));
    return;
  }
  run(*call.operation, &stack);
  for (size_t i = 0; i < call.made.size(); i++) {
    if (call.made[i].isTensor()) put(call.made[i].toTensor(), stack[i].toTensor());
    if (!call.made[i].isTensorList()) continue;
    auto into = call.made[i].toTensorVector(), from = stack[i].toTensorVector();
    for (size_t k = 0; k < into.size(); k++) put(into[k], from[k]);
  }
}

static void replay(const Graph& of) {
  at::NoGradGuard without;
  at::AutoDispatchBelowADInplaceOrView below;
  waits::replay(of.uses);
  auto own = drawer();
  replaying = true;
  for (const auto& call : of.calls) repeat(call);
  for (auto& work : c10d::Nccl::sent()) work->wait();
  c10d::Nccl::sent().clear();
  replaying = false;
  drawer() = own;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<c10d::Nccl, c10::intrusive_ptr<c10d::Nccl>, c10d::Backend>(m, "Nccl")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>, int, int>());
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
      .def(py::init<>())
      .def("register", [](Graph& one, at::Generator drawer) { one.generators.insert(drawer.unsafeGetGeneratorImpl()); })
      .def("uses", [](const Graph& one, const c10d::Nccl& other) { return one.communicators.count(&other) > 0; })
      .def("replay", [](const Graph& one) {
        py::gil_scoped_release others;
        replay(one);
      });
  m.def("begin", [](std::shared_ptr<Graph> one) {
    graph = one;
    waits::begin_capture();
  });
  m.def("end", [] {
    graph->uses = waits::end_capture();
    graph = nullptr;
  });
  m.def("is_capturing", [] { return capturing(); });
  m.def("log", [](py::function function) {
    auto again = [function] {
      py::gil_scoped_acquire mine;
      function();
    };
    log({std::nullopt, {}, {}, drawer(), again});
  });
  m.def("allocated", [] { return allocated.load(); });
  m.def("peak", [] { return peak.load(); });
  m.def("reset_peak", [] { peak = allocated.load(); });
  m.def("set_device", [](int number) { current = number; });
  m.def("device", [] { return static_cast<int>(current); });
  m.def("drawer", [] { return drawer(); });
  m.def("set_drawer", [](at::Generator one) { drawer() = one; });
  py::class_<waits::Moment>(m, "Moment");
  m.def("new_stream", &waits::new_stream);
  m.def("stream", [] { return waits::current; });
  m.def("set_stream", [](waits::Stream one) { waits::current = one; });
  m.def("record", &waits::record);
  m.def("wait", [](waits::Stream one, const waits::Moment& moment) {
    waits::wait(one, moment);
    check_waits();
  });
  m.def("hear", [](const waits::Moment& moment, bool all) { waits::hear(moment.clock, all); });
  m.def("hear_all", &waits::hear_all);
  m.def("record_stream", [](uintptr_t at, waits::Stream one) { waits::record_stream(at, one); });
  m.def("pinned", [](uintptr_t at, size_t size) { waits::take(at, size, false); });
  m.def("in_pass", [](py::function function) { c10d::in_pass = std::move(function); });
}
