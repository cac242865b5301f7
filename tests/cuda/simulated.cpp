// An accelerator for machines that have none: its tensors refuse to mix with the host's, its memory is the host's, and
// its operators are the CPU's. Fresh and freed memory is filled with ones (NaN), so that whoever reads what was not
// written yet, or not any more, gets NaN. Streams are numbers: everything runs at once.

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_set>

namespace {

constexpr auto kind = c10::DeviceType::PrivateUse1;
const c10::Device device(kind, 0);
const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);

// -- Memory

std::atomic<int64_t> allocated{0}, peak{0};

struct Block {
  void* start;
  size_t size;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  allocated -= block->size;
  if (block->size) std::memset(block->start, 0xff, block->size);
  std::free(block->start);
  delete block;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* start = nullptr;
    if (size) {
      TORCH_CHECK(posix_memalign(&start, 64, size) == 0, "the simulated device is out of memory");
      std::memset(start, 0xff, size);
    }
    allocated += size;
    if (allocated > peak) peak = allocated.load();
    return {start, new Block{start, size}, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};

Allocator allocator;
REGISTER_ALLOCATOR(kind, &allocator);

// Memory of the host that counts as pinned.
std::mutex pinned_lock;
std::unordered_set<const void*> pinned;

void unpin(void* start) {
  {
    const std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.erase(start);
  }
  std::free(start);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* start = nullptr;
    TORCH_CHECK(posix_memalign(&start, 64, size ? size : 1) == 0, "the host is out of memory");
    const std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.insert(start);
    return {start, start, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};

PinnedAllocator pinned_allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  bool isPinnedPtr(const void* start) const override {
    const std::lock_guard<std::mutex> guard(pinned_lock);
    return pinned.count(start);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto fresh = allocator.allocate(size);
    if (const size_t kept = std::min(size, storage.nbytes())) std::memcpy(fresh.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

Hooks hooks;

// -- Streams

std::atomic<int64_t> streams{0};
thread_local int64_t current_stream = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  c10::DeviceType type() const override { return kind; }
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Device getDevice() const override { return device; }
  void setDevice(c10::Device chosen) const override {
    TORCH_CHECK(chosen.index() <= 0, "there is one simulated device, not one of number ", chosen.index());
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::UNSAFE, device, current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::UNSAFE, device, 0); }
  c10::Stream getNewStream(c10::Device, int) const override { return c10::Stream(c10::Stream::UNSAFE, device, ++streams); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(device);
    current_stream = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override { *event = this_event; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

 private:
  char* this_event = const_cast<char*>("an event");
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -- Operators

at::Tensor on_host(const at::Tensor& tensor) {
  auto storage = tensor.storage();
  c10::DataPtr memory(
      storage.mutable_data(), new at::Tensor(tensor), [](void* held) { delete static_cast<at::Tensor*>(held); }, c10::kCPU);
  c10::Storage shared(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), c10::GetCPUAllocator(), /*resizable=*/true);
  auto host = at::detail::make_tensor_base<c10::TensorImpl>(
      std::move(shared), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  host.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) host._set_conj(true);
  if (tensor.is_neg()) host._set_neg(true);
  return host;
}

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kind;
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "the simulated device has strided tensors only");
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

// Whether it is an error that the host waits for what the device computes.
std::atomic<bool> refuses_waits{false};

void wait_for_device(const char* why) {
  TORCH_CHECK(!refuses_waits, "the host waits for the device: ", why);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  auto target = is_ours(to) ? on_host(to) : to;
  target.copy_(is_ours(from) ? on_host(from) : from);
  return to;
}

at::Tensor copy_between(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!non_blocking && is_ours(from) != is_ours(to)) wait_for_device("a copy that blocks");
  return copy_from(from, to, non_blocking);
}

at::Scalar item(const at::Tensor& tensor) {
  wait_for_device("it asks for a value");
  return on_host(tensor).item();
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  const size_t needed = (tensor->numel() + tensor->storage_offset()) * self.itemsize();
  if (needed > self.storage().nbytes()) hooks.resizePrivateUse1Bytes(self.storage(), needed);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Tensor& set_storage(
    at::Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage source) {
  const int64_t count = source.nbytes() / self.itemsize();
  return set_storage(self, std::move(source), 0, {count}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// Runs an operator on tensors of the host that have the memory of ours, and gives its new tensors memory of ours.
class OnHost {
 public:
  OnHost(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(stack) {}

  void run() {
    const auto count = op_.schema().arguments().size(), first = stack_->size() - count;
    bool any_of_host = false;
    for (size_t i = first; i < stack_->size(); ++i) {
      const auto& value = (*stack_)[i];
      // Single numbers may be of the host, as with every device.
      any_of_host |= value.isTensor() && value.toTensor().defined() && !is_ours(value.toTensor()) && value.toTensor().dim();
    }
    for (size_t i = first; i < stack_->size(); ++i) enter((*stack_)[i]);
    TORCH_CHECK(
        !any_of_host || ours_.empty(), op_.schema().name(),
        ": Expected all tensors to be on the same device, but found at least two devices, simulated:0 and cpu!");
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    const auto returned = op_.schema().returns().size();
    for (size_t i = stack_->size() - returned; i < stack_->size(); ++i) leave((*stack_)[i]);
  }

 private:
  c10::List<at::Tensor> each(const c10::IValue& list, at::Tensor (OnHost::*moved)(const at::Tensor&)) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& tensor : list.toTensorVector()) made.push_back((this->*moved)(tensor));
    return made;
  }

  at::Tensor to_host(const at::Tensor& tensor) {
    if (!is_ours(tensor)) return tensor;
    for (size_t i = 0; i < ours_.size(); ++i) {
      if (ours_[i].is_same(tensor)) return hosts_[i];
    }
    ours_.push_back(tensor);
    hosts_.push_back(on_host(tensor));
    return hosts_.back();
  }

  void enter(c10::IValue& value) {
    if (value.isTensor()) {
      value = to_host(value.toTensor());
    } else if (value.isTensorList()) {
      value = each(value, &OnHost::to_host);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> hosts;
      for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
        hosts.push_back(tensor ? std::optional<at::Tensor>(to_host(*tensor)) : std::nullopt);
      }
      value = hosts;
    } else if (value.isDevice() && value.toDevice().type() == kind) {
      value = c10::Device(c10::kCPU);
    }
  }

  at::Tensor to_device(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.layout() != c10::kStrided) return tensor;
    for (size_t i = 0; i < hosts_.size(); ++i) {
      if (!hosts_[i].is_same(tensor)) continue;
      if (ours_[i].sizes() != tensor.sizes()) copy_from_and_resize(tensor, ours_[i]);  // an `out=` that was too small
      return ours_[i];
    }
    auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
    copy_from(tensor, made, false);
    return made;
  }

  void leave(c10::IValue& value) {
    if (value.isTensor()) {
      value = to_device(value.toTensor());
    } else if (value.isTensorList()) {
      value = each(value, &OnHost::to_device);
    }
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  std::vector<at::Tensor> ours_, hosts_;
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  OnHost(op, stack).run();
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("_copy_from", &copy_between);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize_);
  m.impl("_local_scalar_dense", &item);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY(simulated, m) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("on_host(Tensor tensor) -> Tensor");
  m.def("allocated() -> int", [] { return allocated.load(); });
  m.def("peak() -> int", [] { return peak.load(); });
  m.def("reset_peak() -> ()", [] { peak = allocated.load(); });
  m.def("refuse_waits(bool refuses) -> ()", [](bool refuses) { refuses_waits = refuses; });
  m.def("new_stream() -> int", [] { return static_cast<int64_t>(++streams); });
  m.def("current_stream() -> int", [] { return current_stream; });
  m.def("set_stream(int stream) -> ()", [](int64_t stream) { current_stream = stream; });
}

TORCH_LIBRARY_IMPL(simulated, PrivateUse1, m) {
  m.impl("on_host", &on_host);
}
