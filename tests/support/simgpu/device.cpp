// Simulates a GPU in host memory: "cuda" tensors have separate storages, and CPU kernels compute them.
//
// PyTorch's dispatcher calls `run_on_cpu` for an operation on such tensors. It runs the same operation on CPU tensors
// that share their memory. The rest of this file implements the environment of kernels: streams and events, a caching
// allocator, pinned memory, random generators, and the hooks through which PyTorch uses them. The docstring of
// __init__.py describes the behavior and its reasons.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>

namespace at {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using c10::Storage;
using c10::Stream;

constexpr auto GPU = c10::DeviceType::CUDA;
constexpr int MAX_DEVICES = 8;
constexpr int64_t MEMORY = int64_t(80) << 30;  // bytes per device

// The pattern of uninitialized and freed memory. As a floating-point number of at least 16 bits, it is a NaN that
// kernels do not produce.
constexpr uint16_t UNWRITTEN = 0xFFFB;
void make_unwritten(char* start, size_t bytes) { std::fill_n((uint16_t*)start, bytes / sizeof(UNWRITTEN), UNWRITTEN); }

int devices = 1;
thread_local int current_device = 0;

// Protects all state below that threads share. While a thread holds this lock, it must not wait for Python's global
// interpreter lock (GIL), because a thread that holds the GIL may be waiting for this lock. It therefore does not call
// Python, and it moves tensors and storages instead of copying or releasing them, because Python counts references to
// them. Globals that PyTorch may use while the process exits are never destroyed.
auto& lock = *new std::recursive_mutex;
using Locked = std::lock_guard<std::recursive_mutex>;

// ---- Reports, which are passed to Python ----------------------------------------------------------------------------

using Callback = void (*)(const char* kind, const char* what, int64_t bytes);
Callback callback = nullptr;

struct Report {
  std::string kind, what;
  int64_t bytes;
};
using Reports = std::vector<Report>;

// Passes reports to Python. The caller must not hold the lock (see above).
void deliver(const Reports& reports) {
  for (auto& report : reports)
    if (callback) callback(report.kind.c_str(), report.what.c_str(), report.bytes);
}

// ---- Streams, which delay copies as long as possible ----------------------------------------------------------------
//
// The operations of a stream are numbered. The vector clock of an event, or of the next operation of a stream, contains
// how many operations of each stream are ordered before it. A kernel runs immediately, after the queued copies that are
// ordered before it. A copy on a side stream is queued until an operation that is ordered after it runs, or until the
// host waits for it.

using StreamKey = std::pair<int, int64_t>;  // device, id
using Clock = std::map<StreamKey, int64_t>;

struct QueuedCopy {
  int64_t number;
  Clock after;
  char *to, *from;
  size_t bytes;
  bool to_host;
  Storage host;  // keeps pinned memory allocated until the copy is complete
};

struct Arrival {  // a completed copy to pinned memory, which the host sees only after it has waited for the copy
  int64_t number;
  char* to;
  std::vector<char> bytes;
  Storage host;
};

struct Departure {  // a copy from pinned memory, which the host must not write to before it has waited for the copy
  int64_t number;
  char* from;
  std::vector<char> bytes;
  Storage host;
};

struct StreamState {
  Clock clock;
  std::deque<QueuedCopy> queue;
  std::deque<Arrival> arrivals;
  std::deque<Departure> departures;
};

auto& streams = *new std::map<StreamKey, StreamState>;
auto& waited_for = *new Clock;  // operations for which the host has waited
auto& finished =
    *new std::vector<Storage>;  // pinned memory of completed copies, released after the lock is released

StreamKey key_of(const Stream& stream) { return {stream.device_index(), stream.id()}; }

void merge(Clock& into, const Clock& other) {
  for (auto& [stream, count] : other) into[stream] = std::max(into[stream], count);
}

bool comes_before(StreamKey stream, int64_t number, const Clock& clock) {
  auto found = clock.find(stream);
  return found != clock.end() && found->second >= number;
}

// Returns the clock of the next operation of a stream, which includes all operations for which the host has waited.
Clock& clock_of(StreamKey stream) {
  auto& clock = streams[stream].clock;
  merge(clock, waited_for);
  return clock;
}

int64_t next_number(StreamKey stream) { return ++clock_of(stream)[stream]; }

bool overlap(const char* one, size_t bytes, const char* other, size_t other_bytes) {
  return one < other + other_bytes && other < one + bytes;
}

// Makes the arrivals for which `due` is true visible to the host.
template <class Due>
void complete_arrivals(const Due& due) {
  for (auto& [stream, state] : streams) {
    auto& arrivals = state.arrivals;
    for (auto arrival = arrivals.begin(); arrival != arrivals.end();) {
      if (!due(stream, *arrival)) {
        ++arrival;
        continue;
      }
      std::memcpy(arrival->to, arrival->bytes.data(), arrival->bytes.size());
      finished.push_back(std::move(arrival->host));
      arrival = arrivals.erase(arrival);
    }
  }
}

// Removes the departures for which `due` is true, and reports a race if the host has written to their memory.
template <class Due>
void complete_departures(Reports& reports, const Due& due) {
  for (auto& [stream, state] : streams) {
    auto& departures = state.departures;
    for (auto departure = departures.begin(); departure != departures.end();) {
      if (!due(stream, *departure)) {
        ++departure;
        continue;
      }
      if (std::memcmp(departure->from, departure->bytes.data(), departure->bytes.size()))
        reports.push_back({"race", "pinned memory was written by the host before its copy to the device was complete",
                           (int64_t)departure->bytes.size()});
      finished.push_back(std::move(departure->host));
      departure = departures.erase(departure);
    }
  }
}

void copy_to_host(Reports& reports, StreamKey stream, int64_t number, char* to, char* from, size_t bytes,
                  Storage host) {
  auto due = [&](auto, auto& departure) { return overlap(departure.from, departure.bytes.size(), to, bytes); };
  complete_departures(reports, due);
  streams[stream].arrivals.push_back({number, to, std::vector<char>(from, from + bytes), std::move(host)});
}

void copy_to_device(char* to, char* from, size_t bytes) {
  complete_arrivals([&](auto, auto& arrival) { return overlap(arrival.to, arrival.bytes.size(), from, bytes); });
  std::memcpy(to, from, bytes);
}

// Makes the queued copies that are ordered before an operation or event with this clock.
void make_copies(Reports& reports, const Clock& before) {
  for (auto& [stream, count] : before) {
    auto& queue = streams[stream].queue;
    while (!queue.empty() && queue.front().number <= count) {
      QueuedCopy copy = std::move(queue.front());
      queue.pop_front();
      make_copies(reports, copy.after);
      if (copy.to_host)
        copy_to_host(reports, stream, copy.number, copy.to, copy.from, copy.bytes, std::move(copy.host));
      else {
        copy_to_device(copy.to, copy.from, copy.bytes);
        finished.push_back(std::move(copy.host));
      }
    }
  }
}

void host_waits(Reports& reports, const Clock& before) {
  make_copies(reports, before);
  merge(waited_for, before);
  auto due = [&](auto stream, auto& copy) { return comes_before(stream, copy.number, before); };
  complete_departures(reports, due);
  complete_arrivals(due);
}

void release_finished() {
  std::vector<Storage> released;
  Locked guard(lock);
  released.swap(finished);
}

Clock clock_of_device(int device) {
  Clock clock;
  for (auto& [stream, state] : streams)
    if (stream.first == device) merge(clock, state.clock);
  return clock;
}

thread_local std::map<int, int64_t> current_streams;  // by device

Stream current_stream(int device) {
  auto found = current_streams.find(device);
  return Stream(Stream::UNSAFE, Device(GPU, device), found == current_streams.end() ? 0 : found->second);
}

// ---- Memory, whose freed blocks are reused immediately by the stream on which they were allocated -------------------

struct Block {
  char* start;
  size_t bytes;
  int device;
  StreamKey owner;
  StreamKey writer;                      // the stream that wrote last
  int64_t written = 0;                   // number of the last operation that wrote, or 0
  std::map<StreamKey, int64_t> readers;  // the last read of each stream since then
  bool recorded = false;                 // whether record_stream was called
};

auto& blocks = *new std::map<char*, Block>;                                          // allocated blocks by address
auto& pool = *new std::map<std::tuple<int, StreamKey, size_t>, std::vector<char*>>;  // addresses of free blocks

struct Statistics {
  int64_t allocated = 0, peak = 0, reserved = 0, allocations = 0;
};
Statistics statistics[MAX_DEVICES];

Block* block_of(const void* address) {
  auto found = blocks.upper_bound((char*)address);
  if (found == blocks.begin()) return nullptr;
  auto& block = (--found)->second;
  return (char*)address < block.start + block.bytes ? &block : nullptr;
}

void release(void* start) {
  if (!start) return;
  Reports reports;
  {
    Locked guard(lock);
    auto found = blocks.find((char*)start);
    if (found == blocks.end()) return;
    Block block = found->second;
    // The next operation of its stream may reuse the memory, so uses on other streams must be ordered before it.
    auto& next = clock_of(block.owner);
    make_copies(reports, block.recorded ? clock_of_device(block.device) : next);
    if (!block.recorded) {
      auto ordered = [&](StreamKey stream, int64_t number) {
        return stream == block.owner || comes_before(stream, number, next);
      };
      for (auto& [stream, number] : block.readers)
        if (!ordered(stream, number))
          reports.push_back({"race", "memory was freed while another stream may read it", (int64_t)block.bytes});
      if (block.written && !ordered(block.writer, block.written))
        reports.push_back({"race", "memory was freed while another stream may write to it", (int64_t)block.bytes});
    }
    make_unwritten(block.start, block.bytes);
    pool[{block.device, block.owner, block.bytes}].push_back(block.start);
    statistics[block.device].allocated -= block.bytes;
    blocks.erase(found);
  }
  deliver(reports);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    int device = current_device;
    if (!bytes) return {nullptr, nullptr, &release, Device(GPU, device)};
    bytes = (bytes + 511) / 512 * 512;  // as in CUDA's allocator
    Locked guard(lock);
    auto& used = statistics[device];
    TORCH_CHECK_WITH(OutOfMemoryError, used.allocated + (int64_t)bytes <= MEMORY,
                     "CUDA out of memory (simulated). Tried to allocate ", bytes, " bytes");
    auto owner = key_of(current_stream(device));
    auto& free = pool[{device, owner, bytes}];
    char* start;
    if (free.empty()) {
      start = (char*)std::aligned_alloc(512, bytes);
      make_unwritten(start, bytes);
      used.reserved += bytes;
    } else {
      start = free.back();
      free.pop_back();
    }
    blocks[start] = Block{start, bytes, device, owner, owner};
    used.allocated += bytes;
    used.peak = std::max(used.peak, used.allocated);
    ++used.allocations;
    return {start, start, &release, Device(GPU, device)};
  }

  void recordStream(const c10::DataPtr& data, Stream) override {
    Locked guard(lock);
    if (auto* block = block_of(data.get())) block->recorded = true;
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = statistics[device].allocated;
    stats.allocated_bytes[0].peak = statistics[device].peak;
    return stats;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { statistics[device].peak = statistics[device].allocated; }
} allocator;

auto& pinned = *new std::map<char*, size_t>;  // size of each block by address

bool is_pinned(const void* address) {
  Locked guard(lock);
  auto found = pinned.upper_bound((char*)address);
  if (found == pinned.begin()) return false;
  --found;
  return (char*)address < found->first + found->second;
}

int64_t pinned_bytes() {  // CUDA's pinned allocator rounds blocks up to powers of two
  Locked guard(lock);
  int64_t bytes = 0;
  for (auto& block : pinned) bytes += std::bit_ceil(block.second);
  return bytes;
}

void unpin(void* start) {
  Locked guard(lock);
  pinned.erase((char*)start);
  std::free(start);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    bytes = (std::max<size_t>(bytes, 1) + 4095) / 4096 * 4096;
    char* start = (char*)std::aligned_alloc(4096, bytes);
    make_unwritten(start, bytes);
    Locked guard(lock);
    pinned[start] = bytes;
    return {start, start, &unpin, Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} pinned_allocator;

// ---- Random generators, which draw on the CPU -----------------------------------------------------------------------

struct GpuGenerator final : c10::GeneratorImpl {
  at::Generator cpu;

  GpuGenerator(int device, at::Generator cpu)
      : GeneratorImpl(Device(GPU, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)), cpu(std::move(cpu)) {}

  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new GpuGenerator(device_.index(), cpu.clone()); }
};

at::Generator make_generator(int device) {
  return at::Generator(c10::make_intrusive<GpuGenerator>(device, at::detail::createCPUGenerator()));
}

const at::Generator& default_generator(int device) {
  static auto& all = *new std::map<int, at::Generator>;
  Locked guard(lock);
  auto found = all.find(device);
  return found != all.end() ? found->second : all.emplace(device, make_generator(device)).first->second;
}

at::Generator& cpu_generator(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == GPU, "Expected a 'cuda' device type for generator but found 'cpu'");
  return static_cast<GpuGenerator*>(generator.unsafeGetGeneratorImpl())->cpu;
}

// ---- PyTorch's interfaces of a device: guard and hooks --------------------------------------------------------------

struct Event {
  Clock clock;
};

void host_waits_for(const char* what, const Clock& before) {
  Reports reports{{"wait", what, 0}};
  {
    Locked guard(lock);
    host_waits(reports, before);
  }
  release_finished();
  deliver(reports);
}

void host_waits_for_device(DeviceIndex device) {
  Clock before;
  {
    Locked guard(lock);
    before = clock_of_device(device);
  }
  host_waits_for("device.synchronize", before);
}

int or_current(DeviceIndex device) { return device < 0 ? current_device : device; }

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return GPU; }
  DeviceIndex deviceCount() const noexcept override { return devices; }
  Device getDevice() const override { return Device(GPU, current_device); }
  void setDevice(Device device) const override { current_device = or_current(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = or_current(device.index()); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  void synchronizeDevice(const DeviceIndex device) const override { host_waits_for_device(device); }

  Stream getStream(Device device) const override { return current_stream(or_current(device.index())); }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(GPU, or_current(device.index())));
  }
  Stream getNewStream(Device device, int) const override {
    static int64_t last_id = 0;
    Locked guard(lock);
    return Stream(Stream::UNSAFE, Device(GPU, or_current(device.index())), ++last_id);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    auto before = current_stream(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return (void*)stream.id(); }
  bool queryStream(const Stream& stream) const override {
    Event event;
    {
      Locked guard(lock);
      event.clock = streams[key_of(stream)].clock;
    }
    return queryEvent(&event);
  }
  void synchronizeStream(const Stream& stream) const override {
    Clock before;
    {
      Locked guard(lock);
      before = streams[key_of(stream)].clock;
    }
    host_waits_for("stream.synchronize", before);
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Locked guard(lock);
    if (!*event) *event = new Event;
    ((Event*)*event)->clock = streams[key_of(stream)].clock;
  }
  void block(void* event, const Stream& stream) const override {
    Locked guard(lock);
    if (event) merge(streams[key_of(stream)].clock, ((Event*)event)->clock);
  }
  bool queryEvent(void* event) const override {
    Locked guard(lock);
    if (event)
      for (auto& [stream, count] : ((Event*)event)->clock) {
        auto waits = [count = count](auto& copy) { return copy.number <= count; };
        auto& state = streams[stream];
        if (std::any_of(state.queue.begin(), state.queue.end(), waits)) return false;
        if (std::any_of(state.arrivals.begin(), state.arrivals.end(), waits)) return false;
      }
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) host_waits_for("event.synchronize", ((Event*)event)->clock);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete (Event*)event; }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }  // ms; durations are not simulated

  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    allocator.recordStream(data, stream);
  }
};

struct CUDAHooks final : at::CUDAHooksInterface {  // PyTorch looks for this name
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }

  DeviceIndex deviceCount() const override { return devices; }
  int getNumGPUs() const override { return devices; }
  DeviceIndex current_device() const override { return at::current_device; }
  DeviceIndex getCurrentDevice() const override { return at::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { at::current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto before = at::current_device;
    at::current_device = or_current(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  void deviceSynchronize(DeviceIndex device) const override { host_waits_for_device(device); }

  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(or_current(device));
  }
  at::Generator getNewGenerator(DeviceIndex device) const override { return make_generator(or_current(device)); }

  at::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  Device getDeviceFromPtr(void* address) const override {
    Locked guard(lock);
    auto* block = block_of(address);
    return Device(GPU, block ? block->device : 0);
  }
};

// ---- Tensors --------------------------------------------------------------------------------------------------------

bool on_gpu(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == GPU; }

Tensor tensor_on(const Storage& storage, c10::DispatchKey device, const Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(Storage(storage), c10::DispatchKeySet(device), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

Tensor gpu_tensor(const Storage& storage, const Tensor& like) {
  return tensor_on(storage, c10::DispatchKey::CUDA, like);
}

// Returns a GPU tensor that shares the storage of `base`. It is an inference tensor if `base` is one.
Tensor gpu_view(const Tensor& base, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset,
                caffe2::TypeMeta dtype) {
  auto view =
      at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, Storage(base.storage()), base.key_set(), dtype);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return view;
}

Storage new_storage(size_t bytes, int device) {
  int before = current_device;
  current_device = device;
  auto data = allocator.allocate(bytes);
  current_device = before;
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(data), &allocator,
                                               /*resizable=*/true);
}

// CPU tensors that share memory with GPU tensors. Aliases share a storage if the tensors do, so views remain views.
struct CpuAliases {
  std::map<c10::StorageImpl*, Storage> cpu;       // by GPU storage
  std::map<c10::StorageImpl*, Tensor> originals;  // by CPU storage
  std::vector<std::pair<Tensor, Tensor>> pairs;   // GPU tensor, alias

  Tensor alias_of(const Tensor& tensor) {
    if (!on_gpu(tensor)) return tensor;
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    if (!cpu.count(storage)) {
      Storage alias = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage->nbytes(),
                                                            c10::DataPtr(storage->mutable_data(), Device(c10::kCPU)),
                                                            c10::GetCPUAllocator(), /*resizable=*/true);
      originals.emplace(alias.unsafeGetStorageImpl(), tensor);
      cpu.emplace(storage, std::move(alias));
    }
    auto alias = tensor_on(cpu.at(storage), c10::DispatchKey::CPU, tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    pairs.emplace_back(tensor, alias);
    return alias;
  }

  // Returns the GPU tensor for a CPU result: a view if the result shares memory with an argument, otherwise a copy.
  Tensor to_gpu(const Tensor& result, int device) {
    if (!result.defined() || !result.has_storage()) return result;
    auto original = originals.find(result.storage().unsafeGetStorageImpl());
    if (original != originals.end())
      return gpu_view(original->second, result.sizes(), result.strides(), result.storage_offset(), result.dtype());
    size_t bytes = result.storage().nbytes();
    auto storage = new_storage(bytes, device);
    if (bytes) std::memcpy(storage.mutable_data(), result.storage().data(), bytes);
    return gpu_tensor(storage, result);
  }

  // Resizes the GPU tensors whose aliases a kernel has resized (out=).
  void resize_originals(int device) {
    for (auto& [tensor, alias] : pairs) {
      auto *from = alias.storage().unsafeGetStorageImpl(), *to = tensor.storage().unsafeGetStorageImpl();
      if (from->data() != to->data() && from->nbytes()) {
        auto fresh = new_storage(from->nbytes(), device);
        std::memcpy(fresh.mutable_data(), from->data(), from->nbytes());
        to->set_data_ptr_noswap(std::move(fresh.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
        to->set_nbytes(from->nbytes());
      }
      if (alias.sizes() != tensor.sizes() || alias.strides() != tensor.strides())
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }
};

template <class Word>
bool has_unwritten(const Word* start, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  if (sizes.empty()) return *start == Word(0xFFFBFFFBFFFBFFFBull);  // UNWRITTEN
  if (sizes.size() == 1 && strides[0] == 1)
    return std::find(start, start + sizes[0], Word(0xFFFBFFFBFFFBFFFBull)) != start + sizes[0];
  for (int64_t i = 0; i < sizes[0]; ++i)
    if (has_unwritten(start + i * strides[0], sizes.slice(1), strides.slice(1))) return true;
  return false;
}

// Returns whether a tensor has elements that were never written after allocation. Only floating-point numbers of at
// least 16 bits are checked, because integers and 8-bit floats may have any value.
bool has_unwritten(const Tensor& tensor) {
  if (!tensor.numel() || !at::isFloatingType(tensor.scalar_type())) return false;
  const auto* start = tensor.const_data_ptr();
  auto search = [&](auto word) {
    auto* words = (const decltype(word)*)start;
    return tensor.is_non_overlapping_and_dense() ? has_unwritten(words, {tensor.numel()}, {1})
                                                 : has_unwritten(words, tensor.sizes(), tensor.strides());
  };
  switch (tensor.element_size()) {
    case 2:
      return search(uint16_t());
    case 4:
      return search(uint32_t());
    case 8:
      return search(uint64_t());
    default:
      return false;
  }
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

int64_t launches = 0;
int sync_mode = 0;  // the mode of torch.cuda.set_sync_debug_mode: 1 warns, 2 raises

struct Use {
  Tensor tensor;
  bool writes;
};

// Reports previous uses of a tensor's memory that are not ordered before this one, and records this one.
void record_use(Reports& reports, const Tensor& tensor, bool writes, StreamKey stream, int64_t number,
         const std::string& name) {
  auto* block = tensor.has_storage() ? block_of(tensor.storage().data()) : nullptr;
  if (!block) return;
  auto unordered = [&, &clock = streams[stream].clock](StreamKey other, int64_t its_number) {
    return other != stream && !comes_before(other, its_number, clock);
  };
  auto race = [&](const char* what) { reports.push_back({"race", name + what, (int64_t)block->bytes}); };
  if (block->written && unordered(block->writer, block->written))
    race(" uses memory to which another stream may not have written yet");
  if (writes) {
    for (auto& [reader, its_number] : block->readers)
      if (unordered(reader, its_number)) race(" overwrites memory that another stream may still read");
    block->readers.clear();
    block->writer = stream;
    block->written = number;
  } else {
    block->readers[stream] = number;
  }
}

// Orders, checks and records an operation on the current stream. waits: describes the wait of the host, or is empty.
void launch(int device, const std::vector<Use>& used, const std::string& name, const std::string& waits) {
  if (!waits.empty()) {
    TORCH_CHECK(sync_mode < 2, "called a synchronizing CUDA operation");
    if (sync_mode == 1) TORCH_WARN("called a synchronizing CUDA operation");
  }
  Reports reports;
  {
    Locked guard(lock);
    ++launches;
    auto stream = key_of(current_stream(device));
    auto number = next_number(stream);
    make_copies(reports, streams[stream].clock);
    for (auto& use : used) {
      record_use(reports, use.tensor, use.writes, stream, number, name);
      if (!use.writes && has_unwritten(use.tensor))
        reports.push_back({"unwritten", name + " reads uninitialized memory", (int64_t)use.tensor.nbytes()});
    }
    if (!waits.empty()) {
      host_waits(reports, streams[stream].clock);
      reports.push_back({"sync", waits, 0});
    }
  }
  release_finished();
  deliver(reports);
}

// Operations for which the host waits, because it needs the result or its shape.
const std::set<std::string> READ_BACK{"aten::_local_scalar_dense",
                                      "aten::is_nonzero",
                                      "aten::equal",
                                      "aten::nonzero",
                                      "aten::nonzero_static",
                                      "aten::masked_select",
                                      "aten::_unique",
                                      "aten::_unique2",
                                      "aten::unique_dim",
                                      "aten::unique_consecutive",
                                      "aten::unique_dim_consecutive",
                                      "aten::bincount",
                                      "aten::repeat_interleave",
                                      "aten::_linalg_eigh",
                                      "aten::linalg_eig",
                                      "aten::_linalg_svd",
                                      "aten::linalg_lstsq"};

// Operations for which the host waits if their indices are on the CPU or are a mask.
const std::set<std::string> INDEXED{"aten::index",      "aten::_unsafe_index",    "aten::index_put",
                                    "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put"};

// Returns whether an operation creates a tensor like another one without reading its elements.
bool only_allocates(const std::string& name) {
  return name.rfind("aten::new_", 0) == 0 || (name.size() > 5 && name.compare(name.size() - 5, 5, "_like") == 0);
}

bool is_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

template <class Visit>
void for_each_tensor(const IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isList()) {
    for (const IValue& element : value.toListRef()) for_each_tensor(element, visit);
  }
}

template <class Change>
IValue with_tensors(const IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (!value.isList()) return value;
  auto list = value.toList().copy();
  for (size_t i = 0; i < list.size(); ++i) list.set(i, with_tensors(list.get(i), change));
  return list;
}

// An operation with its arguments, its device, the memory that it uses, and a description of the host's wait.
struct Call {
  const c10::FunctionSchema& schema;
  std::vector<IValue> arguments;
  int device = -1;
  std::vector<Use> used;
  std::string waits;

  Call(const c10::FunctionSchema& schema, c10::ArrayRef<IValue> values) : schema(schema), arguments(values.vec()) {
    const auto& name = schema.name();
    bool foreach = name.rfind("aten::_foreach", 0) == 0;  // has a slow path for tensors on several devices
    bool cpu_tensors = false, masks = false, cpu_indices = false;
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto& argument = schema.arguments()[i];
      const auto* alias = argument.alias_info();
      bool writes = alias && alias->isWrite(), views = alias && !writes;
      bool indices = INDEXED.count(name) && argument.name() == "indices";
      for_each_tensor(arguments[i], [&](const Tensor& tensor) {
        if (!on_gpu(tensor)) {
          if (indices)
            cpu_indices = true;
          else if (tensor.device().is_cpu() && (tensor.dim() || writes))  // 0-D CPU tensors are allowed as numbers
            cpu_tensors = true;
          return;
        }
        if (indices && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte)) masks = true;
        TORCH_CHECK(device < 0 || device == tensor.device().index(),
                    "Expected all tensors to be on the same device, but found at least two devices, cuda:", device,
                    " and ", tensor.device(), " (", name, ")");
        device = tensor.device().index();
        bool reads = !views && !only_allocates(name) && !(argument.name() == "self" && is_zero("beta"));
        if (writes || reads) used.push_back({tensor, writes});
      });
      if (device < 0 && arguments[i].isDevice() && arguments[i].toDevice().has_index())
        requested = arguments[i].toDevice().index();
    }
    TORCH_CHECK(foreach || device < 0 || !cpu_tensors,
                "Expected all tensors to be on the same device, but found at least two devices, cuda:", device,
                " and cpu! (", name, ")");
    if (device < 0) device = or_current(requested);
    if (cpu_indices)
      waits = name + " with an index on the CPU";
    else if (masks)
      waits = name + " with a mask";
    else if (READ_BACK.count(name) && !has_known_size(name))
      waits = name;
  }

 private:
  DeviceIndex requested = -1;

  bool is_zero(const char* name) const {
    auto index = schema.argumentIndexWithName(name);
    return index && arguments[*index].isScalar() && arguments[*index].toScalar().toDouble() == 0;
  }

  bool has_known_size(const std::string& name) const {
    return name == "aten::repeat_interleave" && arguments.back().isInt();
  }
};

void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  const auto& schema = op.schema();
  Call call(schema, torch::jit::last(stack, schema.arguments().size()));
  launch(call.device, call.used, schema.name(), call.waits);

  CpuAliases aliases;
  const size_t first = stack->size() - call.arguments.size();
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const auto& argument = call.arguments[i];
    auto& value = (*stack)[first + i];
    if (argument.isDevice())
      value = Device(c10::kCPU);
    else if (is_generator(schema.arguments()[i]))
      value = cpu_generator(argument.isNone() ? default_generator(call.device) : argument.toGenerator());
    else
      value = with_tensors(argument, [&](const Tensor& tensor) { return aliases.alias_of(tensor); });
  }
  op.callBoxed(stack);
  aliases.resize_originals(call.device);

  // A result that aliases a written argument is replaced by the argument. Other results are converted to GPU tensors.
  auto returned = [&](const c10::Argument& result) -> const IValue* {
    const auto* alias = result.alias_info();
    if (alias && alias->isWrite())
      for (size_t i = 0; i < call.arguments.size(); ++i) {
        const auto* other = schema.arguments()[i].alias_info();
        if (other && other->isWrite() && other->beforeSets() == alias->beforeSets()) return &call.arguments[i];
      }
    return nullptr;
  };
  const size_t results = stack->size() - schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    auto& value = (*stack)[results + i];
    const auto* argument = returned(schema.returns()[i]);
    value = argument ? *argument
                     : with_tensors(value, [&](const Tensor& tensor) { return aliases.to_gpu(tensor, call.device); });
  }
}

// ---- Operations on storages, which CPU kernels cannot do for another device -----------------------------------------

Tensor allocate(const Tensor& meta, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  int index = or_current(device ? device->index() : -1);
  TORCH_CHECK(index < devices, "CUDA error: invalid device ordinal");
  return gpu_tensor(new_storage(meta.storage().nbytes(), index), meta);
}

at::TensorOptions meta_options(std::optional<at::ScalarType> dtype) {
  return at::TensorOptions().dtype(dtype.value_or(c10::get_default_dtype_as_scalartype())).device(c10::kMeta);
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  auto options = meta_options(dtype).memory_format(format.value_or(at::MemoryFormat::Contiguous));
  return allocate(at::empty(C10_AS_INTARRAYREF_SLOW(size), options), device, pin);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  auto meta = at::empty_strided(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), meta_options(dtype));
  return allocate(meta, device, pin);
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  auto view = gpu_view(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                       offset ? offset->guard_int(__FILE__, __LINE__) : self.storage_offset(), self.dtype());
  at::native::checkInBoundsForStorage(view.sizes(), view.strides(), view.storage_offset(), view.dtype(),
                                      view.storage());
  return view;
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  auto meta = at::empty_strided(self.sizes(), self.strides(), self.options().device(c10::kMeta))
                  .view(C10_AS_INTARRAYREF_SLOW(size));
  return gpu_view(self, meta.sizes(), meta.strides(), self.storage_offset(), self.dtype());
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto options = self.options().device(c10::kMeta).memory_format(format.value_or(at::MemoryFormat::Contiguous));
  auto meta = at::empty(C10_AS_INTARRAYREF_SLOW(size), options);
  size_t bytes = (self.storage_offset() + meta.numel()) * self.itemsize();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) {
    auto fresh = new_storage(bytes, self.device().index());
    if (storage->nbytes()) std::memcpy(fresh.mutable_data(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(fresh.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
    storage->set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
  return self;
}

Tensor& set_to(Tensor& self, const Storage& storage, c10::IntArrayRef size, c10::IntArrayRef stride, int64_t offset) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_storage_offset(Tensor& self, Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                           c10::SymIntArrayRef stride) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto strides = C10_AS_INTARRAYREF_SLOW(stride).vec();
  if (strides.empty()) strides = at::empty(sizes, self.options().device(c10::kMeta)).strides().vec();
  return set_to(self, source, sizes, strides, offset.guard_int(__FILE__, __LINE__));
}

Tensor& set_storage(Tensor& self, Storage source) {
  return set_to(self, source, {int64_t(source.nbytes() / self.itemsize())}, {1}, 0);
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_to(self, source.storage(), source.sizes(), source.strides(), source.storage_offset());
}

Tensor& set_empty(Tensor& self) { return set_to(self, new_storage(0, self.device().index()), {0}, {1}, 0); }

void record_stream(Tensor& self, Stream stream) { allocator.recordStream(self.storage().data_ptr(), stream); }

Tensor pin_memory(const Tensor& self, std::optional<Device>) {
  size_t bytes = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.dtype().itemsize());
  Storage storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, &pinned_allocator,
                                                          /*resizable=*/false);
  return at::empty({0}, self.options()).set_(storage, 0, self.sizes(), self.strides()).copy_(self);
}

// ---- Copies ---------------------------------------------------------------------------------------------------------

void copy_elements(const Tensor& to, const Tensor& from) {
  CpuAliases aliases;
  aliases.alias_of(to).copy_(aliases.alias_of(from));
}

// As in CUDA, the current streams of both devices wait for each other before and after the copy.
void copy_between_devices(const Tensor& to, const Tensor& from) {
  Reports reports;
  {
    Locked guard(lock);
    auto source = key_of(current_stream(from.device().index()));
    auto target = key_of(current_stream(to.device().index()));
    merge(streams[source].clock, streams[target].clock);
    auto number = next_number(source);
    merge(streams[target].clock, streams[source].clock);
    make_copies(reports, streams[target].clock);
    record_use(reports, from, false, source, number, "aten::copy_");
    record_use(reports, to, true, target, next_number(target), "aten::copy_");
  }
  release_finished();
  copy_elements(to, from);
  deliver(reports);
}

// Copies asynchronously to the host. On the default stream, the copy is complete when this function returns, as kernels
// are, but the host must not read the result or write to the source before it has waited.
void copy_async(const Tensor& to, const Tensor& from, bool to_host, const char* way) {
  auto& gpu = to_host ? from : to;
  auto& host = to_host ? to : from;
  auto stream = current_stream(gpu.device().index());
  auto key = key_of(stream);
  auto *target = (char*)to.data_ptr(), *source = (char*)from.data_ptr();
  size_t bytes = to.nbytes();
  Storage memory = host.storage();
  Reports reports{{"async", way, (int64_t)bytes}};
  {
    Locked guard(lock);
    ++launches;
    auto& state = streams[key];
    auto number = next_number(key);
    record_use(reports, gpu, !to_host, key, number, std::string("a copy ") + way);
    if (stream.id() != 0) {
      Clock after = state.clock;
      after[key] = number - 1;
      state.queue.push_back({number, std::move(after), target, source, bytes, to_host, std::move(memory)});
    } else {
      make_copies(reports, state.clock);
      if (to_host) {
        copy_to_host(reports, key, number, target, source, bytes, std::move(memory));
      } else {
        copy_to_device(target, source, bytes);
        state.departures.push_back({number, source, std::vector<char>(source, source + bytes), std::move(memory)});
      }
    }
  }
  release_finished();
  deliver(reports);
}

// Copies between host and device. A non-blocking copy of pinned memory is asynchronous if it keeps dtype and layout.
void copy_host(const Tensor& to, const Tensor& from, bool non_blocking) {
  bool to_host = on_gpu(from);
  auto& gpu = to_host ? from : to;
  bool pins = is_pinned((to_host ? to : from).data_ptr());
  bool plain =
      to.scalar_type() == from.scalar_type() && to.is_non_overlapping_and_dense() && to.strides() == from.strides();
  std::string way = to_host ? "device to host" : "host to device";
  if (non_blocking && pins && plain) return copy_async(to, from, to_host, way.c_str());

  way += !non_blocking ? (pins ? ", blocking, of pinned memory" : ", blocking")
         : pins        ? ", non_blocking, with another layout or dtype"
                       : ", non_blocking, of pageable memory";
  bool staged = non_blocking && !to_host;  // the source is copied to a buffer before this returns
  launch(gpu.device().index(), {{gpu, !to_host}}, "aten::copy_", staged ? "" : way);
  if (staged) deliver({{"pageable", way, (int64_t)to.nbytes()}});
  copy_elements(to, from);
}

Tensor& copy_(Tensor& self, const Tensor& other, bool non_blocking) {
  if (self.is_same(other) || !self.numel()) return self;
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  auto from = other.expand(self.sizes());
  if (!on_gpu(self) || !on_gpu(from)) {
    copy_host(self, from, non_blocking);
  } else if (self.device() != from.device()) {
    copy_between_devices(self, from);
  } else {
    launch(self.device().index(), {{from, false}, {self, true}}, "aten::copy_", "");
    copy_elements(self, from);
  }
  return self;
}

// ---- Operations without a CPU kernel, or whose CPU kernel differs from the GPU kernel -------------------------------

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input * mask * (p == 1 ? 0 : 1 / (1 - p)), mask};
}

Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& least, const at::Scalar& most) {  // or of integers
  auto values = at::isFloatingType(self.scalar_type()) ? self : self.to(at::kFloat);
  return values.to(at::kCPU).histc(bins, least, most).to(self.device()).to(self.scalar_type());
}

int64_t math_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                       std::optional<double>, bool) {
  return 0;  // selects the implementation that consists of separate operations
}

// mm(a, b, out_dtype=...)
Tensor mm_dtype(const Tensor& a, const Tensor& b, at::ScalarType dtype) { return at::mm(a.to(dtype), b.to(dtype)); }
Tensor bmm_dtype(const Tensor& a, const Tensor& b, at::ScalarType dtype) { return at::bmm(a.to(dtype), b.to(dtype)); }
Tensor& mm_dtype_out(const Tensor& a, const Tensor& b, at::ScalarType dtype, Tensor& out) {
  return at::mm_out(out, a.to(dtype), b.to(dtype));
}
Tensor addmm_dtype(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType dtype, const at::Scalar& beta,
                   const at::Scalar& alpha) {
  return at::addmm(self.to(dtype), a.to(dtype), b.to(dtype), beta, alpha);
}
Tensor& addmm_dtype_out(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType dtype,
                        const at::Scalar& beta, const at::Scalar& alpha, Tensor& out) {
  return at::addmm_out(out, self.to(dtype), a.to(dtype), b.to(dtype), beta, alpha);
}

// ---- Registration ---------------------------------------------------------------------------------------------------

C10_REGISTER_GUARD_IMPL(CUDA, DeviceGuard)
REGISTER_CUDA_HOOKS(CUDAHooks)

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset", set_storage_offset);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_empty);
  library.impl("record_stream", record_stream);
  library.impl("copy_", copy_);
  library.impl("native_dropout", native_dropout);
  library.impl("histc", histc);
  library.impl("_fused_sdp_choice", math_attention);
  library.impl("mm.dtype", mm_dtype);
  library.impl("mm.dtype_out", mm_dtype_out);
  library.impl("bmm.dtype", bmm_dtype);
  library.impl("addmm.dtype", addmm_dtype);
  library.impl("addmm.dtype_out", addmm_dtype_out);
}

struct Registration {
  Registration() {
    c10::SetAllocator(GPU, &allocator);
    at::setHostAllocator(GPU, &pinned_allocator);
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&math_attention);
  }
} registration;

}  // namespace
}  // namespace at

// ---- Functions that Python calls ------------------------------------------------------------------------------------

extern "C" {

void sim_callback(at::Callback callback) { at::callback = callback; }
void sim_set_devices(int count) { at::devices = count; }
int sim_devices() { return at::devices; }
void sim_set_sync_mode(int mode) { at::sync_mode = mode; }
int sim_sync_mode() { return at::sync_mode; }
int64_t sim_launches() { return at::launches; }

int64_t sim_memory() { return at::MEMORY; }
int64_t sim_allocated(int device) { return at::statistics[device].allocated; }
int64_t sim_peak(int device) { return at::statistics[device].peak; }
int64_t sim_reserved(int device) { return at::statistics[device].reserved; }
int64_t sim_allocations(int device) { return at::statistics[device].allocations; }
int64_t sim_pinned() { return at::pinned_bytes(); }
void sim_reset_peak(int device) { at::statistics[device].peak = at::statistics[device].allocated; }

int64_t sim_generator_bytes(int device) { return at::cpu_generator(at::default_generator(device)).get_state().numel(); }
void sim_get_generator(int device, void* state) {
  auto tensor = at::cpu_generator(at::default_generator(device)).get_state();
  std::memcpy(state, tensor.data_ptr(), tensor.numel());
}
void sim_set_generator(int device, const void* state, int64_t bytes) {
  auto tensor = at::empty({bytes}, at::TensorOptions(at::kByte).device(at::kCPU));
  std::memcpy(tensor.data_ptr(), state, bytes);
  at::cpu_generator(at::default_generator(device)).set_state(tensor);
}
void sim_seed_generator(int device, uint64_t seed) {
  at::cpu_generator(at::default_generator(device)).set_current_seed(seed);
}
uint64_t sim_generator_seed(int device) { return at::default_generator(device).current_seed(); }

// Implements storage.resize_ on the current stream of the storage's device. All its tensors use the new memory.
void sim_resize_storage(void* pointer, int64_t bytes) {
  auto* storage = (c10::StorageImpl*)pointer;
  auto fresh = at::new_storage(bytes, storage->device().index());
  auto copied = std::min<int64_t>(bytes, storage->nbytes());
  if (copied) std::memcpy(fresh.mutable_data(), storage->data(), copied);
  storage->set_data_ptr_noswap(std::move(fresh.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
  storage->set_nbytes(bytes);
}

}  // extern "C"
