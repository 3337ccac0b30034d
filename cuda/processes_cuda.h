// Copies between GPUs of several processes: processes.h.
//
// A process exports each allocation under its sources once, as a file descriptor; others map it, so
// that their copy engines read it: they cannot write it. Events are passed by their handles.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "copies_cuda.h"
#include "processes.h"

namespace jdistadam {

// Lets a device of this process read its parts. Its thread was made by its start.
inline void EnqueueFor(int32_t ordinal, const CudaCopyJob& job, int place) {
  CopyReader* reader = nullptr;
  (void)CopyReader::Of(ordinal, &reader);
  reader->Enqueue(job, place);
}

// The functions of the driver that share memory: modules do not link it.
struct MemoryDriver {
  decltype(&cuPointerGetAttributes) get_attributes;
  decltype(&cuMemRetainAllocationHandle) retain;
  decltype(&cuMemExportToShareableHandle) export_to;
  decltype(&cuMemImportFromShareableHandle) import_from;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) free;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  decltype(&cuMemRelease) release;

  // Null if the driver lacks one of them.
  static const MemoryDriver* Get() {
    static MemoryDriver driver;
    static const bool is_whole =
        Find("cuPointerGetAttributes", &driver.get_attributes) &&
        Find("cuMemRetainAllocationHandle", &driver.retain) &&
        Find("cuMemExportToShareableHandle", &driver.export_to) &&
        Find("cuMemImportFromShareableHandle", &driver.import_from) &&
        Find("cuMemAddressReserve", &driver.reserve) && Find("cuMemAddressFree", &driver.free) &&
        Find("cuMemMap", &driver.map) && Find("cuMemUnmap", &driver.unmap) &&
        Find("cuMemSetAccess", &driver.set_access) && Find("cuMemRelease", &driver.release);
    return is_whole ? &driver : nullptr;
  }

 private:
  template <typename Function>
  static bool Find(const char* name, Function* function) {
    *function = reinterpret_cast<Function>(FindDriverFunction(name, 11030));
    return *function != nullptr;
  }
};

class CudaBackend {
 public:
  CudaCopies& board() { return CudaBoard(); }

  // Events are opened and memory is mapped for these devices alone: others that this process sees
  // get no context of it.
  void Use(std::vector<int> ordinals) { ordinals_ = std::move(ordinals); }

  // Tells others of the allocation of an array if they have not seen it. Returns why it cannot.
  template <typename Peers>
  std::string Show(const Peers& peers, const char* array, size_t bytes) {
    const MemoryDriver* driver = MemoryDriver::Get();
    if (driver == nullptr) return "the driver cannot share memory";
    const std::lock_guard<std::mutex> lock(mutex_);
    return ShowLocked(*driver, peers, CUdeviceptr(array), bytes);
  }

  CopyAddress AddressOf(const char* pointer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto next = shown_.upper_bound(uint64_t(pointer));
    if (next == shown_.begin()) return {0, 0};
    const auto& [start, allocation] = *std::prev(next);
    return {allocation.number, uint64_t(pointer) - start};
  }

  char* Reach(CopyPeer& peer, const CopyAddress& address, size_t bytes, std::string* why) {
    const auto found = mapped_.find({peer.process, address.allocation});
    const size_t size = found == mapped_.end() ? 0 : found->second.size;
    if (bytes <= size && address.offset <= size - bytes)
      return reinterpret_cast<char*>(found->second.start + address.offset);
    const auto refused = refused_.find(peer.process);
    *why = refused == refused_.end() ? "arrays in memory that is not known" : refused->second;
    return nullptr;
  }

  // Called by the thread that listens alone, as Reach is. Posts of arrays in memory that cannot be
  // mapped are refused with the reason.
  void Learn(CopyPeer& peer, CopyMessage kind, MessageReader& reader) {
    const auto number = reader.Get<uint64_t>(), size = reader.Get<uint64_t>();
    const std::pair<int, uint64_t> key{peer.process, number};
    if (kind == CopyMessage::kMemory) {
      const std::string why = Map(peer.TakePassed(), size, &mapped_[key]);
      if (why.empty()) return;
      refused_[peer.process] = why;
      mapped_.erase(key);
    } else if (const auto found = mapped_.find(key); found != mapped_.end()) {
      const MemoryDriver* driver = MemoryDriver::Get();
      driver->unmap(found->second.start, found->second.size);
      driver->free(found->second.start, found->second.size);
      mapped_.erase(found);
    }
  }

  void PutExtra(MessageWriter* writer, const CopyEvents& events) {
    for (const PooledEvent* event : {&events.ready_shared, &events.read_shared}) {
      cudaIpcEventHandle_t handle{};
      if (cudaIpcGetEventHandle(&handle, event->get()) != cudaSuccess) (void)cudaGetLastError();
      writer->Put(handle);
    }
  }

  bool GetExtra(CopyPeer&, MessageReader* reader, CopyEvents* events) {
    const auto ready = reader->Get<cudaIpcEventHandle_t>();
    const auto read = reader->Get<cudaIpcEventHandle_t>();
    for (const int ordinal : ordinals_) {
      auto& [is_ready, is_read] = events->opened[ordinal];
      is_ready = Opened(ordinal, ready), is_read = Opened(ordinal, read);
      if (is_ready == nullptr || is_read == nullptr) return false;
    }
    return true;
  }

  void Launch(const CudaCopyJob& job) {
    for (int p = 0; p < job->count(); ++p)
      if (job->IsHere(p)) EnqueueFor(job->clique->ordinals[p], job, p);
  }

  // The stream of a device here, on which it starts copies.
  void Uses(int ordinal, cudaStream_t stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    streams_[ordinal] = stream;
  }

  // Returns whether what devices here have enqueued until now is under way, when asked.
  std::function<bool()> UnderWay() {
    const auto ends = std::make_shared<std::vector<PooledEvent>>();
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [ordinal, stream] : streams_) {
      CopyReader* reader = nullptr;
      if (cudaSetDevice(ordinal) != cudaSuccess || CopyReader::Of(ordinal, &reader) != cudaSuccess)
        continue;
      for (const cudaStream_t used : {stream, reader->stream()}) {
        PooledEvent end;
        if (end.Take(ordinal, false) == cudaSuccess &&
            cudaEventRecord(end.get(), used) == cudaSuccess)
          ends->push_back(std::move(end));
      }
    }
    (void)cudaGetLastError();
    return [ends] {
      return std::any_of(ends->begin(), ends->end(), [](const PooledEvent& end) {
        return cudaEventQuery(end.get()) == cudaErrorNotReady;
      });
    };
  }

 private:
  struct Shown {
    uint64_t number, id;  // for others; of CUDA, which uses none again
    size_t size;
  };
  struct Mapped {
    CUdeviceptr start;
    size_t size;
  };

  // Returns why it cannot.
  std::string Map(int fd, size_t size, Mapped* mapped) {
    const MemoryDriver* driver = MemoryDriver::Get();
    if (driver == nullptr || fd < 0) return "memory without a descriptor";
    CUmemGenericAllocationHandle handle = 0;
    CUresult error = driver->import_from(&handle, reinterpret_cast<void*>(intptr_t(fd)),
                                         CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    close(fd);
    if (error != CUDA_SUCCESS) return "memory that cannot be imported" + CodeOf(error);
    error = driver->reserve(&mapped->start, size, 0, 0, 0);
    if (error == CUDA_SUCCESS) error = driver->map(mapped->start, size, 0, handle, 0);
    driver->release(handle);  // the mapping keeps it
    std::vector<CUmemAccessDesc> access;
    for (const int i : ordinals_)
      access.push_back({{CU_MEM_LOCATION_TYPE_DEVICE, i}, CU_MEM_ACCESS_FLAGS_PROT_READ});
    if (error == CUDA_SUCCESS)
      error = driver->set_access(mapped->start, size, access.data(), access.size());
    if (error == CUDA_SUCCESS) {
      mapped->size = size;
      return "";
    }
    if (mapped->start != 0) driver->unmap(mapped->start, size), driver->free(mapped->start, size);
    return "memory that cannot be mapped" + CodeOf(error);
  }

  static std::string CodeOf(CUresult error) {
    return " (CUDA driver error " + std::to_string(int(error)) + ")";
  }

  // Null if it cannot be opened. The same event always has the same handle.
  cudaEvent_t Opened(int ordinal, const cudaIpcEventHandle_t& handle) {
    const std::string name(handle.reserved, sizeof handle.reserved);
    cudaEvent_t& event = opened_[{ordinal, name}];
    if (event != nullptr) return event;
    cudaError_t error = cudaSetDevice(ordinal);
    if (error == cudaSuccess) error = cudaIpcOpenEventHandle(&event, handle);
    if (error == cudaSuccess) return event;
    (void)cudaGetLastError();
    return event = nullptr;
  }

  template <typename Peers>
  std::string ShowLocked(const MemoryDriver& driver, const Peers& peers, CUdeviceptr array,
                         size_t bytes) {
    unsigned long long id = 0;
    CUdeviceptr start = 0;
    size_t size = 0;
    CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_BUFFER_ID,
                                   CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                                   CU_POINTER_ATTRIBUTE_RANGE_SIZE};
    void* values[] = {&id, &start, &size};
    if (driver.get_attributes(3, names, values, array) != CUDA_SUCCESS || size == 0)
      return "memory that CUDA does not know";
    if (bytes > size || array - start > size - bytes)
      return "an array in several allocations, of which others see one at a time";
    // Those that overlap have gone: their addresses are used again.
    auto old = shown_.lower_bound(start);
    if (old != shown_.begin() && std::prev(old)->first + std::prev(old)->second.size > start) --old;
    while (old != shown_.end() && old->first < start + size) {
      if (old->first == start && old->second.id == id) return "";
      MessageWriter gone;
      gone.Put(old->second.number).Put(uint64_t{0});
      for (const auto& [process, peer] : peers) peer->Send(CopyMessage::kGone, gone.bytes);
      old = shown_.erase(old);
    }
    CUmemGenericAllocationHandle handle = 0;
    if (driver.retain(&handle, reinterpret_cast<void*>(start)) != CUDA_SUCCESS)
      return "memory of an allocator that cannot share it";
    int fd = -1;
    const CUresult error =
        driver.export_to(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    driver.release(handle);
    if (error != CUDA_SUCCESS) return "memory that cannot be exported";
    const Shown made{++last_number_, id, size};
    MessageWriter memory;
    memory.Put(made.number).Put(uint64_t(size));
    for (const auto& [process, peer] : peers) peer->Send(CopyMessage::kMemory, memory.bytes, fd);
    close(fd);
    shown_[start] = made;
    return "";
  }

  std::vector<int> ordinals_;
  std::mutex mutex_;
  std::map<uint64_t, Shown> shown_;  // by start
  uint64_t last_number_ = 0;
  std::map<std::pair<int, uint64_t>, Mapped> mapped_;  // by process and number
  std::map<int, std::string> refused_;                 // why memory was not mapped, by process
  std::map<int, cudaStream_t> streams_;                // of programs, by device here
  std::map<std::pair<int, std::string>, cudaEvent_t> opened_;  // by device here and handle
};

inline CopyProcesses<CudaCopies, CudaBackend>& CudaProcesses() {
  static auto* processes = new CopyProcesses<CudaCopies, CudaBackend>;
  return *processes;
}

}  // namespace jdistadam
