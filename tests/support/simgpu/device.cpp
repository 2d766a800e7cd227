// A GPU made of host memory: tensors of device "cuda" with real storages, whose kernels are those of the CPU.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/Resize.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace at {
namespace {
using c10::Device; using c10::DeviceIndex; using c10::Stream; 
constexpr auto kDev = c10::DeviceType::CUDA;
using Callback = void (*)(const char*, const char*, int64_t);
Callback callback = nullptr;
int devices = 1;
auto& lock = *new std::recursive_mutex;
using Guard = std::lock_guard<std::recursive_mutex>;
struct Note { std::string kind, what; int64_t bytes; };
void emit(const Note& n) { if (callback) callback(n.kind.c_str(), n.what.c_str(), n.bytes); }
void emit(const std::vector<Note>& all) { for (auto& n : all) emit(n); }

// ---- streams: copies on a side stream happen as late as an order that somebody waits for allows --------------------
using Key = std::pair<int, int64_t>;   // device, stream
using Clock = std::map<Key, int64_t>;  // how many operations of each stream come before
struct Item { int64_t seq; Clock deps; char *into, *from; size_t n; bool to_host; c10::Storage host; };
struct Landing { int64_t seq; char* into; std::vector<char> bytes; c10::Storage host; };
struct Pinned { int64_t seq; char* from; std::vector<char> bytes; c10::Storage host; };
struct Str { Clock clock; std::deque<Item> queue; std::deque<Landing> landing; std::deque<Pinned> reads; };
auto& streams = *new std::map<Key, Str>;
auto& graveyard = *new std::vector<c10::Storage>;  // to be released without the lock
Key key(const Stream& s) { return {s.device_index(), s.id()}; }
void merge(Clock& into, const Clock& other) { for (auto& [k, v] : other) into[k] = std::max(into[k], v); }
int64_t tick(Key k) { return ++streams[k].clock[k]; }
bool before(const Clock& c, Key k, int64_t seq) { auto i = c.find(k); return i != c.end() && i->second >= seq; }

void land(Str& s, const Clock* upto, Key k, const char* lo, size_t n) {
  for (auto i = s.landing.begin(); i != s.landing.end();) {
    bool due = upto ? before(*upto, k, i->seq) : (i->into < lo + n && lo < i->into + i->bytes.size());
    if (!due) { ++i; continue; }
    std::memcpy(i->into, i->bytes.data(), i->bytes.size());
    graveyard.push_back(std::move(i->host));
    i = s.landing.erase(i);
  }
}
void check_reads(std::vector<Note>& notes, const Clock* upto, const char* lo, size_t n) {
  for (auto& [k, s] : streams)
    for (auto i = s.reads.begin(); i != s.reads.end();) {
      bool due = upto ? before(*upto, k, i->seq) : (i->from < lo + n && lo < i->from + i->bytes.size());
      if (!due) { ++i; continue; }
      if (std::memcmp(i->from, i->bytes.data(), i->bytes.size()))
        notes.push_back({"race", "pinned memory was written by the host before its copy to the device had ended", (int64_t)i->bytes.size()});
      graveyard.push_back(std::move(i->host));
      i = s.reads.erase(i);
    }
}
void execute(Key k, Item& i, std::vector<Note>& notes) {
  if (i.to_host) {
    check_reads(notes, nullptr, i.into, i.n);
    streams[k].landing.push_back({i.seq, i.into, std::vector<char>(i.from, i.from + i.n), i.host});
  } else {
    for (auto& [k2, s] : streams) land(s, nullptr, k2, i.from, i.n);
    std::memcpy(i.into, i.from, i.n);
    graveyard.push_back(std::move(i.host));
  }
}
void run_upto(const Clock& c, std::vector<Note>& notes) {
  for (auto& [k, seq] : c) {
    auto& q = streams[k].queue;
    while (!q.empty() && q.front().seq <= seq) {
      Item item = std::move(q.front()); q.pop_front();
      run_upto(item.deps, notes);
      execute(k, item, notes);
    }
  }
}
void bury() { std::vector<c10::Storage> gone; { Guard g(lock); gone.swap(graveyard); } }
void host_waits(const Clock& c, std::vector<Note>& notes) {
  run_upto(c, notes);
  check_reads(notes, &c, nullptr, 0);
  for (auto& [k, s] : streams) land(s, &c, k, nullptr, 0);
}
Clock everything(int device) { Clock c; for (auto& [k, s] : streams) if (k.first == device) merge(c, s.clock); return c; }

// ---- memory: blocks are reused at once by their stream, and are full of NaN until they are written -----------------
struct Block { char* p; size_t n; int device; Key owner; Key writer; int64_t written = 0; std::map<Key, int64_t> readers; bool recorded = false; };
auto& blocks = *new std::map<char*, Block>;                                    // live
auto& pool = *new std::map<std::tuple<int, Key, size_t>, std::vector<char*>>;  // free
int64_t live[8], peak[8], reserved[8], count[8];
Block* block_of(const void* p) {
  auto i = blocks.upper_bound((char*)p);
  if (i == blocks.begin()) return nullptr;
  --i; return (char*)p < i->second.p + i->second.n ? &i->second : nullptr;
}
thread_local std::map<int, int64_t> current_streams; thread_local int current = 0;
Stream current_stream(int d) { return Stream(Stream::UNSAFE, Device(kDev, d), current_streams.count(d) ? current_streams[d] : 0); }

void release(void* p) {
  if (!p) return;
  std::vector<Note> notes;
  { Guard g(lock);
    auto i = blocks.find((char*)p); if (i == blocks.end()) return;
    Block b = i->second;
    auto& own = streams[b.owner].clock;
    run_upto(own, notes);  // what its stream does later may have the memory
    if (b.recorded) run_upto(everything(b.device), notes);
    else {
      for (auto& [k, seq] : b.readers) if (k != b.owner && !before(own, k, seq)) notes.push_back({"race", "memory was given back that another stream still reads", (int64_t)b.n});
      if (b.written && b.writer != b.owner && !before(own, b.writer, b.written)) notes.push_back({"race", "memory was given back that another stream still writes", (int64_t)b.n});
    }
    std::memset(b.p, 0xFF, b.n);
    pool[{b.device, b.owner, b.n}].push_back(b.p);
    live[b.device] -= b.n; blocks.erase(i);
  }
  emit(notes);
}
int64_t limit[8];
struct Alloc final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    int d = current; auto k = key(current_stream(d));
    if (!n) return {nullptr, nullptr, &release, Device(kDev, d)};
    n = (n + 511) / 512 * 512;
    Guard g(lock);
    TORCH_CHECK_WITH(OutOfMemoryError, !limit[d] || live[d] + (int64_t)n <= limit[d], "CUDA out of memory (simulated). Tried to allocate ", n, " bytes");
    auto& f = pool[{d, k, n}]; char* p;
    if (f.empty()) { p = (char*)std::aligned_alloc(512, n); reserved[d] += n; std::memset(p, 0xFF, n); } else { p = f.back(); f.pop_back(); }
    blocks[p] = Block{p, n, d, k, k};
    live[d] += n; peak[d] = std::max(peak[d], live[d]); ++count[d];
    return {p, p, &release, Device(kDev, d)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& p, Stream) override { Guard g(lock); if (auto b = block_of(p.get())) b->recorded = true; }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    c10::CachingDeviceAllocator::DeviceStats s; auto& a = s.allocated_bytes[0]; a.current = live[d]; a.peak = peak[d]; return s; }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex d) override { peak[d] = live[d]; }
} allocator;

auto& pinned = *new std::set<std::pair<char*, size_t>>;
bool is_pinned(const void* p) { Guard g(lock); auto i = pinned.upper_bound({(char*)p, SIZE_MAX}); if (i == pinned.begin()) return false; --i; return (char*)p < i->first + i->second; }
void unpin(void* p) { Guard g(lock); auto i = pinned.lower_bound({(char*)p, 0}); if (i != pinned.end() && i->first == p) pinned.erase(i); std::free(p); }
int64_t pinned_allocations = 0;
struct HostAlloc final : at::HostAllocator {
  c10::DataPtr allocate(size_t n) override {
    n = std::max<size_t>(n, 1); char* p = (char*)std::aligned_alloc(4096, (n + 4095) / 4096 * 4096); std::memset(p, 0xFF, n);
    Guard g(lock); pinned.insert({p, n}); ++pinned_allocations; return {p, p, &unpin, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {} at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {} void reset_peak_stats() override {}
} host_allocator;

// ---- generators ------------------------------------------------------------------------------------------------------
struct Gen final : c10::GeneratorImpl {
  at::Generator inner;
  explicit Gen(int d, at::Generator g) : GeneratorImpl(Device(kDev, d), c10::DispatchKeySet(c10::DispatchKey::CUDA)), inner(std::move(g)) {}
  void set_current_seed(uint64_t s) override { inner.set_current_seed(s); }
  void set_offset(uint64_t) override {} uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(inner).seed(); }
  void set_state(const c10::TensorImpl& s) override { inner.unsafeGetGeneratorImpl()->set_state(s); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new Gen(device_.index(), inner.clone()); }
};
at::Generator make_generator(int d) { return at::Generator(c10::make_intrusive<Gen>(d, at::detail::createCPUGenerator(67280421310721 + d))); }
const at::Generator& default_generator(int d) { static std::vector<at::Generator> all{make_generator(0), make_generator(1), make_generator(2), make_generator(3)}; return all[d < 0 ? current : d]; }
at::Generator cpu_generator(const std::optional<at::Generator>& g, int d) {
  auto used = g && g->defined() ? *g : default_generator(d);
  if (used.device().type() == c10::kCPU) TORCH_CHECK(false, "Expected a 'cuda' device type for generator but found 'cpu'");
  return static_cast<Gen*>(used.unsafeGetGeneratorImpl())->inner;
}

// ---- guard and hooks ---------------------------------------------------------------------------------------------------
struct Event { Clock clock; };
struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDev; }
  Device exchangeDevice(Device d) const override { Device was(kDev, current); current = d.index() < 0 ? current : d.index(); return was; }
  Device getDevice() const override { return Device(kDev, current); }
  void setDevice(Device d) const override { if (d.index() >= 0) current = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0) current = d.index(); }
  Stream getStream(Device d) const override { return current_stream(d.index() < 0 ? current : d.index()); }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::DEFAULT, Device(kDev, d.index() < 0 ? current : d.index())); }
  Stream getNewStream(Device d, int) const override { static int64_t n = 0; Guard g(lock); return Stream(Stream::UNSAFE, Device(kDev, d.index() < 0 ? current : d.index()), ++n); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override { auto was = current_stream(s.device_index()); current_streams[s.device_index()] = s.id(); return was; }
  void* getStreamNativeHandle(const Stream s) const override { return (void*)s.id(); }
  DeviceIndex deviceCount() const noexcept override { return devices; }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete (Event*)e; }
  void record(void** e, const Stream& s, const DeviceIndex, const c10::EventFlag) const override { Guard g(lock); if (!*e) *e = new Event; ((Event*)*e)->clock = streams[key(s)].clock; }
  void block(void* e, const Stream& s) const override { Guard g(lock); if (e) merge(streams[key(s)].clock, ((Event*)e)->clock); }
  bool queryEvent(void* e) const override { if (!e) return true; Guard g(lock);
    for (auto& [k, seq] : ((Event*)e)->clock) { auto& s = streams[k]; if (!s.queue.empty() && s.queue.front().seq <= seq) return false; for (auto& l : s.landing) if (l.seq <= seq) return false; } return true; }
  bool queryStream(const Stream& s) const override { Event e; { Guard g(lock); e.clock = streams[key(s)].clock; } return queryEvent(&e); }
  void wait(const char* what, const Clock& c) const { std::vector<Note> notes{{"wait", what, 0}}; { Guard g(lock); host_waits(c, notes); } bury(); emit(notes); }
  void synchronizeStream(const Stream& s) const override { Clock c; { Guard g(lock); c = streams[key(s)].clock; } wait("stream.synchronize", c); }
  void synchronizeEvent(void* e) const override { if (e) wait("event.synchronize", ((Event*)e)->clock); }
  void synchronizeDevice(const DeviceIndex d) const override { Clock c; { Guard g(lock); c = everything(d); } wait("device.synchronize", c); }
  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const override { allocator.recordStream(p, s); }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, GuardImpl)

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; } bool isAvailable() const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override { return make_generator(d < 0 ? current : d); }
  Device getDeviceFromPtr(void* p) const override { Guard g(lock); auto b = block_of(p); return Device(kDev, b ? b->device : 0); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  bool hasCUDA() const override { return true; } bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex deviceCount() const override { return devices; } int getNumGPUs() const override { return devices; }
  void setCurrentDevice(DeviceIndex d) const override { current = d; } DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { auto was = current; if (d >= 0) current = d; return was; }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  void deviceSynchronize(DeviceIndex d) const override { GuardImpl().synchronizeDevice(d); }
};

// ---- kernels -----------------------------------------------------------------------------------------------------------
const std::set<std::string> reads_back{"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2", "aten::_unique", "aten::unique_dim",
  "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount", "aten::repeat_interleave", "aten::histc", "aten::is_nonzero", "aten::nonzero_static", "aten::_linalg_eigh", "aten::linalg_eig", "aten::_linalg_svd", "aten::linalg_lstsq"};
const std::set<std::string> takes_cpu_indices{"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_unsafe_index", "aten::_unsafe_index_put"};

struct Aliases {  // CPU tensors on the memory of those of the device
  std::map<c10::StorageImpl*, c10::Storage> made; std::map<c10::StorageImpl*, c10::Storage> origin;
  std::vector<std::pair<Tensor, Tensor>> pairs;
  Tensor of(const Tensor& t) {
    auto* impl = t.storage().unsafeGetStorageImpl(); auto i = made.find(impl);
    if (i == made.end()) {
      c10::DataPtr p(impl->mutable_data(), Device(c10::kCPU));
      i = made.emplace(impl, c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), impl->nbytes(), std::move(p), c10::GetCPUAllocator(), true))).first;
      origin.emplace(i->second.unsafeGetStorageImpl(), t.storage());
    }
    auto a = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(i->second), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
    a.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) a.unsafeGetTensorImpl()->set_wrapped_number(true);
    pairs.emplace_back(t, a);
    return a;
  }
};
Tensor on_device(const c10::Storage& s, const Tensor& like) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(s), c10::DispatchKeySet(c10::DispatchKey::CUDA), like.dtype());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return t;
}
c10::Storage new_storage(size_t n, int d) {
  int was = current; current = d;
  auto s = c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), n, allocator.allocate(n), &allocator, true));
  current = was; return s;
}
void uses(std::vector<Note>& notes, const Tensor& t, Key k, int64_t seq, bool writes, const std::string& name) {
  auto* b = t.has_storage() ? block_of(t.storage().data()) : nullptr; if (!b) return;
  auto& c = streams[k].clock;
  if (b->written && b->writer != k && !before(c, b->writer, b->written)) notes.push_back({"race", name + " uses what another stream may not have written yet", (int64_t)b->n});
  if (writes) {
    for (auto& [r, s] : b->readers) if (r != k && !before(c, r, s)) notes.push_back({"race", name + " writes over what another stream still reads", (int64_t)b->n});
    b->readers.clear(); b->writer = k; b->written = seq;
  } else b->readers[k] = std::max(b->readers[k], seq);
}
int64_t launches = 0;
int sync_mode = 0;
void begin_kernel(int d, const std::vector<std::pair<Tensor, bool>>& used, const std::string& name, bool waits) {
  TORCH_CHECK(!waits || sync_mode < 2, "called a synchronizing CUDA operation");
  std::vector<Note> notes;
  { Guard g(lock); auto k = key(current_stream(d)); auto seq = tick(k); ++launches;
    run_upto(streams[k].clock, notes);
    for (auto& [t, w] : used) uses(notes, t, k, seq, w, name);
    if (waits) host_waits(streams[k].clock, notes); }
  bury(); emit(notes);
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema(); const auto& name = schema.name(); const auto n = schema.arguments().size();
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  auto args = torch::jit::last(stack, n); const auto start = stack->size() - n;
  std::vector<c10::IValue> original(args.begin(), args.end());
  int d = -1; bool foreach = name.rfind("aten::_foreach", 0) == 0, cpu_wide = false, cpu_written = false, masks = false, cpu_index = false;
  std::vector<std::pair<Tensor, bool>> used;
  auto see = [&](const Tensor& t, bool writes, bool index) {
    if (!t.defined()) return;
    if (t.device().type() == kDev) {
      if (index && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte)) masks = true;
      TORCH_CHECK(d < 0 || d == t.device().index(), "Expected all tensors to be on the same device, but found at least two devices, cuda:", d, " and ", t.device(), " (", name, ")");
      d = t.device().index(); used.emplace_back(t, writes);
    } else if (t.device().is_cpu()) { if (index) cpu_index = true; else if (t.dim()) cpu_wide = true; if (writes) cpu_written = true; }
  };
  std::optional<Device> asked;
  for (size_t i = 0; i < n; ++i) {
    const auto& v = original[i]; const auto& a = schema.arguments()[i]; bool writes = a.alias_info() && a.alias_info()->isWrite();
    bool index = takes_cpu_indices.count(name) && a.name() == "indices";
    if (v.isTensor()) see(v.toTensor(), writes, index);
    else if (v.isTensorList()) for (const auto& t : v.toTensorVector()) see(t, writes, index);
    else if (v.isOptionalTensorList()) { for (const auto& t : v.toOptionalTensorVector()) if (t) see(*t, writes, index); }
    else if (v.isList()) { for (const c10::IValue& e : v.toListRef()) if (e.isTensor()) see(e.toTensor(), writes, index); }
    else if (v.isDevice()) asked = v.toDevice();
  }
  TORCH_CHECK(foreach || d < 0 || !(cpu_wide || cpu_written), "Expected all tensors to be on the same device, but found at least two devices, cuda:", d, " and cpu! (", name, ")");
  if (d < 0) d = asked && asked->has_index() ? asked->index() : current;
  bool waits = reads_back.count(name) || masks || cpu_index;
  if (name == "aten::repeat_interleave" && original.back().isInt()) waits = false;
  begin_kernel(d, used, name, waits);
  if (waits) emit({"sync", cpu_index ? name + " by an index of the CPU" : masks ? name + " by a mask" : name, 0});

  Aliases aliases;
  auto as_cpu = [&](const Tensor& t) { return t.defined() && t.device().type() == kDev ? aliases.of(t) : t; };
  for (size_t i = 0; i < n; ++i) {
    auto& v = (*stack)[start + i]; const auto& a = schema.arguments()[i];
    bool generator = a.type()->kind() == c10::TypeKind::GeneratorType || (a.type()->kind() == c10::TypeKind::OptionalType && a.type()->castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::GeneratorType);
    if (v.isTensor()) v = as_cpu(v.toTensor());
    else if (v.isTensorList()) { std::vector<Tensor> l; for (const auto& t : v.toTensorVector()) l.push_back(as_cpu(t)); v = c10::List<Tensor>(l); }
    else if (v.isOptionalTensorList()) { c10::List<std::optional<Tensor>> l; for (const auto& t : v.toOptionalTensorVector()) l.push_back(t ? std::optional<Tensor>(as_cpu(*t)) : std::nullopt); v = l; }
    else if (v.isDevice()) v = Device(c10::kCPU);
    else if (generator) v = cpu_generator(v.isNone() ? std::nullopt : std::optional<at::Generator>(v.toGenerator()), d);
  }
  op.callBoxed(stack);

  for (auto& [t, a] : aliases.pairs) {  // out= has been resized
    auto* s = a.storage().unsafeGetStorageImpl(); auto* o = t.storage().unsafeGetStorageImpl();
    if (s->data() != o->data() && s->nbytes()) { int was = current; current = d; auto fresh = allocator.allocate(s->nbytes()); current = was; std::memcpy(fresh.get(), s->data(), s->nbytes()); o->set_data_ptr_noswap(std::move(fresh)); o->set_nbytes(s->nbytes()); }
    if (a.sizes() != t.sizes() || a.strides() != t.strides()) t.unsafeGetTensorImpl()->set_sizes_and_strides(a.sizes(), a.strides(), a.storage_offset());
  }
  const auto results = schema.returns().size(); const auto first = stack->size() - results;
  auto back = [&](const Tensor& t) -> Tensor {
    if (!t.defined() || !t.has_storage()) return t;
    auto o = aliases.origin.find(t.storage().unsafeGetStorageImpl());
    if (o != aliases.origin.end()) return on_device(o->second, t);
    auto s = new_storage(t.storage().nbytes(), d);
    if (t.storage().nbytes()) std::memcpy(s.mutable_data(), t.storage().data(), t.storage().nbytes());
    return on_device(s, t);
  };
  for (size_t r = 0; r < results; ++r) {
    auto& v = (*stack)[first + r]; const auto* info = schema.returns()[r].alias_info(); bool found = false;
    if (info && info->isWrite())
      for (size_t i = 0; i < n && !found; ++i) { const auto* ai = schema.arguments()[i].alias_info(); if (ai && ai->isWrite() && ai->beforeSets() == info->beforeSets()) { v = original[i]; found = true; } }
    if (found) continue;
    if (v.isTensor()) v = back(v.toTensor());
    else if (v.isTensorList()) { std::vector<Tensor> l; for (const auto& t : v.toTensorVector()) l.push_back(back(t)); v = c10::List<Tensor>(l); }
  }
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  int d = device && device->has_index() ? device->index() : current; TORCH_CHECK(d < devices, "CUDA error: invalid device ordinal");
  auto sizes = C10_AS_INTARRAYREF_SLOW(size); auto type = c10::scalarTypeToTypeMeta(dtype.value_or(c10::get_default_dtype_as_scalartype()));
  auto meta = at::empty(sizes, at::TensorOptions().dtype(type).device(c10::kMeta).memory_format(format.value_or(at::MemoryFormat::Contiguous)));
  return on_device(new_storage(meta.storage().nbytes(), d), meta);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  int d = device && device->has_index() ? device->index() : current; TORCH_CHECK(d < devices, "CUDA error: invalid device ordinal");
  auto meta = at::empty_strided(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at::TensorOptions().dtype(dtype.value_or(c10::get_default_dtype_as_scalartype())).device(c10::kMeta));
  return on_device(new_storage(meta.storage().nbytes(), d), meta);
}
Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto t = on_device(self.storage(), self);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset ? offset->guard_int(__FILE__, __LINE__) : self.storage_offset());
  at::native::checkInBoundsForStorage(t.sizes(), t.strides(), t.storage_offset(), t.dtype(), t.storage());
  return t;
}
const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size); auto* impl = self.unsafeGetTensorImpl();
  auto meta = at::empty(sizes, at::TensorOptions().dtype(self.dtype()).device(c10::kMeta).memory_format(format.value_or(at::MemoryFormat::Contiguous)));
  auto need = (self.storage_offset() + (size_t)meta.numel()) * self.itemsize(); auto* s = self.storage().unsafeGetStorageImpl();
  if (need > s->nbytes()) { auto fresh = new_storage(need, self.device().index()); std::memcpy(fresh.mutable_data(), s->data(), s->nbytes()); s->set_data_ptr_noswap(std::move(fresh.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks())); s->set_nbytes(need); }
  impl->set_sizes_and_strides(meta.sizes(), meta.strides()); return self;
}
Tensor& set_storage(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl(); impl->set_storage_keep_dtype(source);
  auto sizes = C10_AS_INTARRAYREF_SLOW(size); std::vector<int64_t> strides(sizes.size());
  if (stride.size()) { auto given = C10_AS_INTARRAYREF_SLOW(stride); strides.assign(given.begin(), given.end()); } else { int64_t step = 1; for (int i = (int)sizes.size() - 1; i >= 0; --i) { strides[i] = step; step *= std::max<int64_t>(sizes[i], 1); } }
  impl->set_sizes_and_strides(sizes, strides, offset.guard_int(__FILE__, __LINE__)); return self;
}
Tensor& set_whole(Tensor& self, at::Storage source) { int64_t n = source.nbytes() / self.itemsize(); return set_storage(self, source, 0, c10::SymIntArrayRef(reinterpret_cast<const c10::SymInt*>(&n), 1), {}); }
Tensor& set_tensor(Tensor& self, const Tensor& source) { auto* impl = self.unsafeGetTensorImpl(); impl->set_storage_keep_dtype(source.storage()); impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset()); return self; }
Tensor& set_nothing(Tensor& self) { auto* impl = self.unsafeGetTensorImpl(); impl->set_storage_keep_dtype(new_storage(0, self.device().index())); impl->set_sizes_and_strides(c10::IntArrayRef{0}, c10::IntArrayRef{1}, 0); return self; }
Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  auto meta = at::empty_strided(self.sizes(), self.strides(), self.options().device(c10::kMeta)).view(C10_AS_INTARRAYREF_SLOW(size));
  auto t = on_device(self.storage(), self); t.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides(), self.storage_offset()); return t;
}
Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  if (self.is_same(from)) return self;
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  Aliases aliases; auto src = from.expand(self.sizes());
  bool to = self.device().type() == kDev, out = src.device().type() == kDev; int d = to ? self.device().index() : src.device().index();
  auto plain = [&](const Tensor& a, const Tensor& b) { aliases.of(a); };
  (void)plain;
  auto cpu = [&](const Tensor& t) { return t.device().type() == kDev ? aliases.of(t) : t; };
  if (!self.numel()) return self;
  if (to && out && self.device() != src.device()) {  // as CUDA: both streams wait for each other before and after
    Guard g(lock); auto a = key(current_stream(self.device().index())), b = key(current_stream(src.device().index()));
    merge(streams[a].clock, streams[b].clock); merge(streams[b].clock, streams[a].clock);
    auto seq = tick(b); merge(streams[a].clock, streams[b].clock);
    std::vector<Note> notes; run_upto(streams[a].clock, notes); uses(notes, src, b, seq, false, "aten::copy_"); uses(notes, self, a, tick(a), true, "aten::copy_");
    cpu(self).copy_(cpu(src)); return self;
  }
  if (to && out) { begin_kernel(d, {{src, false}, {self, true}}, "aten::copy_", false); cpu(self).copy_(cpu(src)); return self; }
  auto& host = to ? src : self; bool pin = is_pinned(host.data_ptr()); const int64_t bytes = self.nbytes();
  bool simple = self.scalar_type() == src.scalar_type() && self.is_non_overlapping_and_dense() && self.strides() == src.strides();
  const char* way = to ? "host to device" : "device to host";
  auto s = current_stream(d); auto k = key(s);
  if (!non_blocking || !pin || !simple) {
    bool waits = !(non_blocking && to);  // the host's memory is staged: a copy of it is made before the call returns
    begin_kernel(d, {{to ? self : src, to}}, "aten::copy_", waits);
    if (!waits && pin && !simple) emit({"pageable", std::string(way) + ", with another layout or dtype", bytes});
    else emit({waits ? "sync" : "pageable", std::string(way) + (non_blocking ? (pin ? ", non_blocking, with another layout or dtype" : ", non_blocking, of pageable memory") : pin ? ", blocking, of pinned memory" : ", blocking"), bytes});
    cpu(self).copy_(cpu(src)); return self;
  }
  std::vector<Note> notes{{"async", way, bytes}};
  { Guard g(lock); auto seq = tick(k); ++launches; uses(notes, to ? self : src, k, seq, to, std::string("a copy ") + way);
    char *a = (char*)self.data_ptr(), *b = (char*)src.data_ptr(); Str& str = streams[k];
    if (s.id()) { Clock deps = str.clock; deps[k] = seq - 1; str.queue.push_back({seq, deps, a, b, (size_t)bytes, !to, host.storage()}); }
    else {
      run_upto(str.clock, notes);
      if (!to) { check_reads(notes, nullptr, a, bytes); str.landing.push_back({seq, a, std::vector<char>(b, b + bytes), host.storage()}); }
      else { for (auto& [k2, other] : streams) land(other, nullptr, k2, b, bytes); std::memcpy(a, b, bytes); str.reads.push_back({seq, b, std::vector<char>(b, b + bytes), host.storage()}); }
    } }
  bury(); emit(notes); return self;
}
Tensor& record_stream_dummy(Tensor& t) { return t; }
void record_stream(Tensor& self, Stream s) { allocator.recordStream(self.storage().data_ptr(), s); }
std::tuple<Tensor, Tensor> native_dropout(const Tensor& in, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {in.clone(), at::ones_like(in, at::kBool)};
  auto mask = at::empty_like(in, at::kBool).bernoulli_(1 - p); return {in * mask * (p == 1 ? 0 : 1 / (1 - p)), mask};
}
Tensor pin_memory(const Tensor& self, std::optional<Device>) {
  auto s = c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.dtype().itemsize()), &host_allocator, false));
  auto t = at::empty({0}, self.options()).set_(s, 0, self.sizes(), self.strides()); t.copy_(self); return t;
}
Tensor histc(const Tensor& t, int64_t bins, const at::Scalar& lo, const at::Scalar& hi) { return (at::isFloatingType(t.scalar_type()) ? t : t.to(at::kFloat)).to(at::kCPU).histc(bins, lo, hi).to(t.device()).to(t.scalar_type()); }
int64_t sdp_math(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) { return 0; }

Tensor mm_dtype(const Tensor& a, const Tensor& b, at::ScalarType dtype) { return at::mm(a.to(dtype), b.to(dtype)); }
Tensor bmm_dtype(const Tensor& a, const Tensor& b, at::ScalarType dtype) { return at::bmm(a.to(dtype), b.to(dtype)); }
Tensor& mm_dtype_out(const Tensor& a, const Tensor& b, at::ScalarType dtype, Tensor& out) { return at::mm_out(out, a.to(dtype), b.to(dtype)); }
Tensor addmm_dtype(const Tensor& s, const Tensor& a, const Tensor& b, at::ScalarType dtype, const at::Scalar& beta, const at::Scalar& alpha) { return at::addmm(s.to(dtype), a.to(dtype), b.to(dtype), beta, alpha); }
Tensor& addmm_dtype_out(const Tensor& s, const Tensor& a, const Tensor& b, at::ScalarType dtype, const at::Scalar& beta, const at::Scalar& alpha, Tensor& out) { return at::addmm_out(out, s.to(dtype), a.to(dtype), b.to(dtype), beta, alpha); }
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty); m.impl("empty_strided", empty_strided); m.impl("as_strided", as_strided); m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage); m.impl("set_.source_Storage", set_whole); m.impl("set_.source_Tensor", set_tensor); m.impl("set_", set_nothing);
  m.impl("view", view); m.impl("copy_", copy_); m.impl("record_stream", record_stream); m.impl("native_dropout", native_dropout);
  m.impl("_fused_sdp_choice", sdp_math);
  m.impl("mm.dtype", mm_dtype); m.impl("histc", histc); m.impl("bmm.dtype", bmm_dtype); m.impl("mm.dtype_out", mm_dtype_out); m.impl("addmm.dtype", addmm_dtype); m.impl("addmm.dtype_out", addmm_dtype_out);
}
struct Init { Init() { c10::SetAllocator(kDev, &allocator); at::setHostAllocator(kDev, &host_allocator); at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&sdp_math); } } init;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace
}  // namespace at

extern "C" {
using namespace at;
void sim_callback(Callback c) { callback = c; }
void sim_devices(int n) { devices = n; }
int sim_device_count() { return devices; }
int sim_get_sync_mode() { return sync_mode; }
uint64_t sim_generator_initial_seed(int d) { return static_cast<Gen*>(default_generator(d).unsafeGetGeneratorImpl())->inner.current_seed(); }
void sim_sync_mode(int m) { sync_mode = m; }
void sim_limit(int d, int64_t n) { limit[d] = n; }
int64_t sim_live(int d) { return live[d]; }
int64_t sim_peak(int d) { return peak[d]; }
int64_t sim_reserved(int d) { return reserved[d]; }
int64_t sim_count(int d) { return count[d]; }
int64_t sim_launches() { return launches; }
int64_t sim_pinned() { return pinned_allocations; }
void sim_reset_peak(int d) { peak[d] = live[d]; }
int64_t sim_generator_state(int d, void* p, int64_t n) {
  auto inner = static_cast<Gen*>(default_generator(d).unsafeGetGeneratorImpl())->inner; auto state = inner.get_state();
  if (p && n) { auto t = at::empty({n}, at::kByte); std::memcpy(t.data_ptr(), p, n); inner.set_state(t); }
  else if (p) std::memcpy(p, state.data_ptr(), state.numel());
  return state.numel(); }
void sim_generator_seed(int d, uint64_t s) { static_cast<Gen*>(default_generator(d).unsafeGetGeneratorImpl())->inner.set_current_seed(s); }
int sim_has_cuda() { return at::hasCUDA(); }
}
