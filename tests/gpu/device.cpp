// A device that pretends to be another, for tests without a GPU: "pretend".
//
// Its memory is the host's, but torch takes it for another device's: an operation that mixes its tensors with the CPU's
// is an error, as on a GPU, and so is a collective that NCCL would have no way for (see pretend.py). Operations are
// computed on the CPU, on copies. PrivateUse1 is torch's key for devices that others add; torch's own
// torch_openreg (test/cpp_extensions/open_registration_extension) is such a device with all that belongs to one.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;
using std::optional;

namespace {

constexpr auto PRETEND = c10::DeviceType::PrivateUse1;

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? std::malloc(bytes) : nullptr;
    return {memory, memory, &std::free, c10::Device(PRETEND, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} allocator;
REGISTER_ALLOCATOR(PRETEND, &allocator);

// One stream, in which all has happened at once.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return PRETEND; }
  c10::Device getDevice() const override { return {PRETEND, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override { *event = &allocator; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Random numbers: the CPU's, of a generator that no operation of the CPU takes for its own.
struct Generator final : c10::GeneratorImpl {
  at::Generator inner;
  explicit Generator(at::Generator cpu)
      : GeneratorImpl({PRETEND, 0}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(inner).seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(inner.clone()); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Generator>(at::detail::createCPUGenerator());
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator own = getNewGenerator(0);
    return own;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto fresh = allocator.allocate(bytes);
    if (size_t kept = std::min(bytes, storage.nbytes())) std::memcpy(fresh.mutable_get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
} hooks;

// The same elements as the CPU sees them.
Tensor host(const Tensor& t) {
  if (t.device().type() != PRETEND) return t;
  Tensor bytes = at::from_blob(t.storage().mutable_data(), {int64_t(t.storage().nbytes())}, at::dtype(at::kByte));
  auto seen = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(bytes.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  seen->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return Tensor(seen);
}

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

Tensor empty(SymIntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<at::Device>,
             optional<bool>, optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &allocator, KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(SymIntArrayRef size, SymIntArrayRef stride, optional<at::ScalarType> dtype, optional<at::Layout>,
                     optional<at::Device>, optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator, KEYS, c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  host(to).copy_(host(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

const Tensor& resize_(const Tensor& self, SymIntArrayRef symbolic, optional<at::MemoryFormat>) {
  auto size = C10_AS_INTARRAYREF_SLOW(symbolic);
  if (self.sizes() == size) return self;  // with its strides
  size_t bytes = (c10::multiply_integers(size) + self.storage_offset()) * self.dtype().itemsize();
  if (self.storage().nbytes() < bytes) hooks.resizePrivateUse1Bytes(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, optional<SymInt> offset) {
  optional<int64_t> at = offset ? optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}

Tensor view(const Tensor& self, SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor& set_(Tensor& self, at::Storage storage, SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset.expect_int());
  if (stride.empty()) impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  else impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

Tensor& set_whole(Tensor& self, at::Storage storage) {
  SymInt size(int64_t(storage.nbytes() / self.dtype().itemsize()));
  return set_(self, storage, 0, size, {});
}

at::Scalar item(const Tensor& self) { return host(self).item(); }

bool is_here(const Tensor& t) { return t.device().type() == PRETEND; }

// All else: on the CPU. Scalars may be there, and so may indices into what is here, as on a GPU; but not both in one list.
void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& name = op.schema().name();
  auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  bool by_index = name == "aten::index" || name.rfind("aten::index_put", 0) == 0 || name == "aten::_index_put_impl_";
  by_index = by_index && is_here(arguments[0].toTensor());
  bool here = false, there = false, apart = false;
  auto see = [&](const Tensor& t) {
    if (t.defined() && t.dim() > 0) (is_here(t) ? here : there) = true;
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& argument = arguments[i];
    if (argument.isTensor()) see(argument.toTensor());
    if (argument.isTensorList()) {
      auto list = argument.toTensorVector();
      for (const Tensor& t : list) see(t), apart |= is_here(t) != is_here(list[0]);
    }
    if (argument.isOptionalTensorList() && !by_index)
      for (const optional<Tensor>& t : argument.toOptionalTensorVector()) if (t) see(*t);
    if (argument.isGenerator()) {
      auto* own = dynamic_cast<Generator*>(argument.toGenerator().unsafeGetGeneratorImpl());
      TORCH_CHECK(own, name, ": a generator of the CPU for a tensor of the pretended device");
      torch::jit::peek(*stack, i, arguments.size()) = own->inner;
    }
  }
  TORCH_CHECK(!apart && !(here && there), name, ": tensors of the CPU and of the pretended device");
  at::native::cpu_fallback(op, stack, true);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_));
  m.impl("set_.source_Storage", TORCH_FN(set_whole));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("_local_scalar_dense", TORCH_FN(item));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }  // casts nothing

}  // namespace
