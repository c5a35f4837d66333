// Emulates HCCL between processes of one machine. Ranks exchange data through files that all ranks
// hold open. They exchange the order and lengths of the data through a block of shared memory.
//
// A rank runs a collective in four steps:
// - It waits until all ranks have read its last contribution.
// - It writes and publishes its new contribution.
// - It waits for the contributions of the other ranks.
// - It reads them.
//
// Reductions run in rank order in fp32 (fp64 and integers in 64 bits) and round once, so every rank
// has the same result. A device rounds at each step.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <fcntl.h>
#include <hccl/hccl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "graph.h"
#include "runtime.h"

namespace npu_ops::emulator {
namespace {

using Clock = std::chrono::steady_clock;

struct Failure {
  HcclResult code;
  std::string sentence;
};

// The collective that a rank has called; it must be the same on all ranks.
struct Call {
  char op[32];
  uint64_t count;
  int32_t dtype, reduce;
  uint32_t root;

  bool operator==(const Call& other) const {
    return !std::strcmp(op, other.op) && count == other.count && dtype == other.dtype &&
           reduce == other.reduce && root == other.root;
  }
};

struct Slot {
  std::atomic<int32_t> pid;      // 0 until the rank has joined
  std::atomic<int32_t> left;     // 1 after the rank has destroyed its communicator
  std::atomic<uint64_t> posted;  // number of the last collective that it has published
  std::atomic<uint64_t> done;    // number of the last collective that it has read
  Call call;
};

// Messages from one rank to another. The sender waits only if kMessages messages are not received
// yet.
struct Pair {
  static constexpr uint64_t kMessages = 256;
  std::atomic<uint64_t> sent, received;
  struct {
    uint64_t offset, bytes;
  } message[kMessages];
};

bool is_running(int pid) {
  char path[64], text[512];
  std::snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  std::FILE* file = std::fopen(path, "r");
  if (!file) return false;
  const size_t size = std::fread(text, 1, sizeof(text) - 1, file);
  std::fclose(file);
  text[size] = 0;
  const char* state = std::strrchr(text, ')');  // "pid (name) S ..."
  return state && state[2] != 'Z' && state[2] != 'X';
}

size_t size_of(HcclDataType dtype) {
  switch (dtype) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8:
      return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16:
      return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32:
      return 4;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64:
      return 8;
    default:
      throw Failure{HCCL_E_NOT_SUPPORT, "data type " + std::to_string(dtype) + " is not emulated"};
  }
}

template <class T, class Sum>
void accumulate(Sum* sum, const void* in, uint64_t count, HcclReduceOp op, bool first) {
  const T* values = static_cast<const T*>(in);
  for (uint64_t i = 0; i < count; ++i) {
    const Sum value = static_cast<Sum>(values[i]);
    sum[i] = first                    ? value
             : op == HCCL_REDUCE_SUM  ? sum[i] + value
             : op == HCCL_REDUCE_PROD ? sum[i] * value
             : op == HCCL_REDUCE_MAX  ? std::max(sum[i], value)
                                      : std::min(sum[i], value);
  }
}

class Communicator {
 public:
  // Joins the group whose files begin with `path`. Returns when all ranks have joined.
  Communicator(const char* path, uint32_t ranks, uint32_t rank)
      : path_(path), ranks_(ranks), rank_(rank) {
    const size_t bytes = ranks * sizeof(Slot) + size_t{ranks} * ranks * sizeof(Pair);
    const int control = open_file(path_);
    if (ftruncate(control, static_cast<off_t>(bytes)))
      throw Failure{HCCL_E_MEMORY, "no room for " + path_};
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, control, 0);
    close(control);
    if (memory == MAP_FAILED) throw Failure{HCCL_E_MEMORY, "no room for " + path_};
    slots_ = static_cast<Slot*>(memory);
    pairs_ = reinterpret_cast<Pair*>(slots_ + ranks);
    for (uint32_t r = 0; r < ranks; ++r) {
      data_.push_back(open_file(path_ + ".data." + std::to_string(r)));
      mail_.push_back(open_file(path_ + ".mail." + std::to_string(r)));
    }
    slots_[rank].pid = getpid();
    wait("joining the group", [&](uint32_t r) { return slots_[r].pid != 0; });
    begin({"init"}, nullptr, 0);
    finish();
    // All ranks have all files open, so the files can be unlinked: a crash then leaves none behind.
    for (uint32_t r = 0; r < ranks; ++r) {
      unlink((path_ + ".data." + std::to_string(r)).c_str());
      unlink((path_ + ".mail." + std::to_string(r)).c_str());
    }
    unlink(path_.c_str());
  }

  ~Communicator() {
    slots_[rank_].left = 1;
    for (int file : data_) close(file);
    for (int file : mail_) close(file);
  }

  uint32_t ranks() const { return ranks_; }
  uint32_t rank() const { return rank_; }
  const std::string& name() const { return path_; }
  std::mutex mutex;

  // Publishes `bytes` of `data` as this rank's part of a collective; waits for the other parts.
  void begin(const Call& call, const void* data, size_t bytes) {
    const uint64_t number = ++number_;
    wait(call.op, [&](uint32_t r) { return slots_[r].done >= number - 1; });
    write_all(data_[rank_], data, bytes, 0);
    slots_[rank_].call = call;
    slots_[rank_].posted = number;
    wait(call.op, [&](uint32_t r) { return slots_[r].posted >= number; });
    for (uint32_t r = 0; r < ranks_; ++r) {
      const Call& other = slots_[r].call;
      if (!(other == call))
        throw Failure{HCCL_E_PARA, "ranks disagree: rank " + std::to_string(rank_) + " calls " +
                                       describe(call) + ", rank " + std::to_string(r) + " calls " +
                                       describe(other)};
    }
  }

  void read(uint32_t rank, void* out, size_t bytes, size_t offset) const {
    read_all(data_[rank], out, bytes, offset);
  }

  void finish() { slots_[rank_].done = number_; }

  // Reduces elements [first, first + count) over all ranks.
  void reduce(void* out, uint64_t first, uint64_t count, HcclDataType dtype, HcclReduceOp op) {
    switch (dtype) {
      case HCCL_DATA_TYPE_FP32:
        return reduce_as<float, float>(out, first, count, op);
      case HCCL_DATA_TYPE_FP16:
        return reduce_as<c10::Half, float>(out, first, count, op);
      case HCCL_DATA_TYPE_BFP16:
        return reduce_as<c10::BFloat16, float>(out, first, count, op);
      case HCCL_DATA_TYPE_FP64:
        return reduce_as<double, double>(out, first, count, op);
      case HCCL_DATA_TYPE_INT8:
        return reduce_as<int8_t, int64_t>(out, first, count, op);
      case HCCL_DATA_TYPE_UINT8:
        return reduce_as<uint8_t, int64_t>(out, first, count, op);
      case HCCL_DATA_TYPE_INT16:
        return reduce_as<int16_t, int64_t>(out, first, count, op);
      case HCCL_DATA_TYPE_INT32:
        return reduce_as<int32_t, int64_t>(out, first, count, op);
      case HCCL_DATA_TYPE_INT64:
        return reduce_as<int64_t, int64_t>(out, first, count, op);
      default:
        throw Failure{HCCL_E_NOT_SUPPORT,
                      "a reduction of data type " + std::to_string(dtype) + " is not emulated"};
    }
  }

  void send(uint32_t to, const void* data, size_t bytes) {
    check_rank(to);
    Pair& pair = pairs_[rank_ * ranks_ + to];
    const uint64_t number = pair.sent;
    wait_for(to, "send", [&] { return number - pair.received < Pair::kMessages; });
    auto& message = pair.message[number % Pair::kMessages];
    message = {mail_end_, bytes};
    write_all(mail_[rank_], data, bytes, mail_end_);
    mail_end_ += (bytes + 4095) / 4096 * 4096;
    pair.sent = number + 1;
  }

  void receive(uint32_t from, void* out, size_t bytes) {
    check_rank(from);
    Pair& pair = pairs_[from * ranks_ + rank_];
    const uint64_t number = pair.received;
    wait_for(from, "recv", [&] { return pair.sent > number; });
    const auto message = pair.message[number % Pair::kMessages];
    if (message.bytes != bytes)
      throw Failure{HCCL_E_PARA, "rank " + std::to_string(rank_) + " receives " +
                                     std::to_string(bytes) + " bytes, but rank " +
                                     std::to_string(from) + " sent " +
                                     std::to_string(message.bytes)};
    read_all(mail_[from], out, bytes, message.offset);
    fallocate(mail_[from], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
              static_cast<off_t>(message.offset), static_cast<off_t>((bytes + 4095) / 4096 * 4096));
    pair.received = number + 1;
  }

 private:
  static std::string describe(const Call& call) {
    return std::string(call.op) + "(count " + std::to_string(call.count) + ", data type " +
           std::to_string(call.dtype) + ")";
  }

  static int open_file(const std::string& path) {
    const int file = open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (file < 0) throw Failure{HCCL_E_OPEN_FILE_FAILURE, "cannot open " + path};
    return file;
  }

  static void write_all(int file, const void* data, size_t bytes, size_t offset) {
    const char* from = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t written = pwrite(file, from, bytes, static_cast<off_t>(offset));
      if (written <= 0)
        throw Failure{HCCL_E_MEMORY, "no room for " + std::to_string(bytes) +
                                         " bytes in shared memory (NPU_OPS_EMULATOR_SHM names "
                                         "another folder)"};
      from += written, offset += written, bytes -= written;
    }
  }

  static void read_all(int file, void* out, size_t bytes, size_t offset) {
    char* to = static_cast<char*>(out);
    while (bytes > 0) {
      const ssize_t got = pread(file, to, bytes, static_cast<off_t>(offset));
      if (got <= 0) throw Failure{HCCL_E_INTERNAL, "a peer's data ends early"};
      to += got, offset += got, bytes -= got;
    }
  }

  template <class T, class Sum>
  void reduce_as(void* out, uint64_t first, uint64_t count, HcclReduceOp op) {
    constexpr uint64_t kBlock = uint64_t{1} << 20;
    const uint64_t block = std::min(kBlock, count);
    std::vector<T> in(block);
    std::vector<Sum> sum(block);
    for (uint64_t begin = 0; begin < count; begin += kBlock) {
      const uint64_t n = std::min(kBlock, count - begin);
      for (uint32_t r = 0; r < ranks_; ++r) {
        read(r, in.data(), n * sizeof(T), (first + begin) * sizeof(T));
        accumulate<T>(sum.data(), in.data(), n, op, r == 0);
      }
      std::transform(sum.begin(), sum.begin() + n, static_cast<T*>(out) + begin,
                     [](Sum value) { return static_cast<T>(value); });
    }
  }

  void check_rank(uint32_t rank) const {
    if (rank >= ranks_)
      throw Failure{HCCL_E_PARA, "there is no rank " + std::to_string(rank) + " in a group of " +
                                     std::to_string(ranks_)};
  }

  template <class Ready>
  void wait(const char* what, const Ready& ready) {
    for (uint32_t r = 0; r < ranks_; ++r)
      if (r != rank_) wait_for(r, what, [&] { return ready(r); });
  }

  // Waits until ready(). Throws if the peer has died or has left the group, or after
  // HCCL_EXEC_TIMEOUT (HCCL_CONNECT_TIMEOUT before the peer has joined).
  template <class Ready>
  void wait_for(uint32_t peer, const char* what, const Ready& ready) {
    const auto limit = Clock::now() + std::chrono::seconds(seconds("HCCL_EXEC_TIMEOUT", 1800));
    const auto join = Clock::now() + std::chrono::seconds(seconds("HCCL_CONNECT_TIMEOUT", 120));
    for (int turn = 0; !ready(); ++turn) {
      if (turn < 200) {
        std::this_thread::yield();
        continue;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(turn < 2000 ? 50 : 1000));
      if (turn % 50 != 0) continue;
      const int pid = slots_[peer].pid;
      const std::string who = "rank " + std::to_string(peer) + " of " + std::to_string(ranks_);
      const std::string me = "rank " + std::to_string(rank_) + " waits in " + what;
      if (pid && !is_running(pid) && !ready())
        throw Failure{HCCL_E_REMOTE,
                      who + " (process " + std::to_string(pid) + ") died while " + me};
      if (slots_[peer].left && !ready())
        throw Failure{HCCL_E_REMOTE, who + " has destroyed its group while " + me};
      if (Clock::now() > (pid ? limit : join))
        throw Failure{HCCL_E_TIMEOUT, who + " did not come while " + me};
    }
  }

  static int seconds(const char* variable, int otherwise) {
    const char* text = std::getenv(variable);
    return text && std::atoi(text) > 0 ? std::atoi(text) : otherwise;
  }

  const std::string path_;
  const uint32_t ranks_, rank_;
  Slot* slots_;
  Pair* pairs_;
  std::vector<int> data_, mail_;
  uint64_t number_ = 0, mail_end_ = 0;
};

Communicator& group(HcclComm comm) { return *static_cast<Communicator*>(comm); }

// Returns the folder for the files: NPU_OPS_EMULATOR_SHM, else /dev/shm if it has more than 1 GiB
// free, else TMPDIR or /tmp.
std::string folder() {
  if (const char* asked = std::getenv("NPU_OPS_EMULATOR_SHM")) return asked;
  struct statvfs info;
  if (!statvfs("/dev/shm", &info) && info.f_bavail * info.f_frsize > uint64_t{1} << 30)
    return "/dev/shm";
  const char* temporary = std::getenv("TMPDIR");
  return temporary ? temporary : "/tmp";
}

thread_local int group_depth = 0;
thread_local std::vector<std::function<HcclResult()>> deferred;

template <class Body>
HcclResult guarded(const char* name, const Body& body) {
  trace(name);
  try {
    if (capturing())
      throw Failure{HCCL_E_NOT_SUPPORT, "collectives are not captured by the emulated NPU"};
    body();
    return HCCL_SUCCESS;
  } catch (const Failure& failure) {
    return static_cast<HcclResult>(fail(failure.code, std::string(name) + ": " + failure.sentence));
  }
}

Call describe(const char* op, uint64_t count, HcclDataType dtype, int reduce = -1,
              uint32_t root = 0) {
  Call call{};
  std::snprintf(call.op, sizeof(call.op), "%s", op);
  call.count = count;
  call.dtype = dtype;
  call.reduce = reduce;
  call.root = root;
  return call;
}

// Runs one collective: publishes this rank's data, calls `read` to fetch this rank's result, and
// marks the collective as read.
template <class Read>
HcclResult collective(HcclComm comm, const Call& call, const void* data, size_t bytes,
                      const Read& read) {
  return guarded(call.op, [&] {
    Communicator& all = group(comm);
    std::lock_guard lock(all.mutex);
    all.begin(call, data, bytes);
    read(all);
    all.finish();
  });
}

char* advance(const void* buffer, uint64_t bytes) {
  return const_cast<char*>(static_cast<const char*>(buffer)) + bytes;
}

// Returns the contribution to an all_to_all: a count and an offset for each rank, then data.
std::vector<char> with_table(const void* data, const uint64_t* counts, const uint64_t* offsets,
                             uint32_t ranks, size_t size) {
  uint64_t end = 0;
  for (uint32_t r = 0; r < ranks; ++r) end = std::max(end, offsets[r] + counts[r]);
  std::vector<char> packed(2 * ranks * sizeof(uint64_t) + end * size);
  std::memcpy(packed.data(), counts, ranks * sizeof(uint64_t));
  std::memcpy(packed.data() + ranks * sizeof(uint64_t), offsets, ranks * sizeof(uint64_t));
  if (end) std::memcpy(packed.data() + 2 * ranks * sizeof(uint64_t), data, end * size);
  return packed;
}

HcclResult all_to_all(HcclComm comm, const void* in, const uint64_t* counts,
                      const uint64_t* offsets, void* out, const uint64_t* out_counts,
                      const uint64_t* out_offsets, HcclDataType dtype) {
  return guarded("all_to_all", [&] {
    Communicator& all = group(comm);
    std::lock_guard lock(all.mutex);
    const uint32_t n = all.ranks();
    const size_t size = size_of(dtype);
    const auto packed = with_table(in, counts, offsets, n, size);
    all.begin(describe("all_to_all", 0, dtype), packed.data(), packed.size());
    for (uint32_t r = 0; r < n; ++r) {
      uint64_t count, offset;
      all.read(r, &count, sizeof(count), all.rank() * sizeof(count));
      all.read(r, &offset, sizeof(offset), (n + all.rank()) * sizeof(offset));
      if (count != out_counts[r])
        throw Failure{HCCL_E_PARA, "rank " + std::to_string(all.rank()) + " expects " +
                                       std::to_string(out_counts[r]) + " elements of rank " +
                                       std::to_string(r) + ", which sends " +
                                       std::to_string(count)};
      all.read(r, advance(out, out_offsets[r] * size), count * size,
               2 * n * sizeof(uint64_t) + offset * size);
    }
    all.finish();
  });
}

}  // namespace
}  // namespace npu_ops::emulator

using namespace npu_ops::emulator;

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo* root) {
  std::random_device random;
  std::memset(root, 0, sizeof(*root));
  std::snprintf(root->internal, sizeof(root->internal), "%s/npu_ops_hccl_%d_%08x%08x",
                folder().c_str(), getpid(), random(), random());
  return HCCL_SUCCESS;
}
HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* root, uint32_t rank,
                                HcclComm* comm) {
  return guarded("init", [&] { *comm = new Communicator(root->internal, ranks, rank); });
}
HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* root, uint32_t rank,
                                      const HcclCommConfig*, HcclComm* comm) {
  return HcclCommInitRootInfo(ranks, root, rank, comm);
}
HcclResult HcclCommDestroy(HcclComm comm) {
  delete static_cast<Communicator*>(comm);
  return HCCL_SUCCESS;
}
HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
  *error = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}
const char* HcclGetErrorString(HcclResult) { return "see the message of the emulated NPU"; }
uint32_t HcclGetCommConfigCapability() { return 0; }
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }
HcclResult HcclGetCommName(HcclComm comm, char* name) {
  std::snprintf(name, COMM_NAME_MAX_LENGTH, "%s", group(comm).name().c_str());
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankSize(HcclComm comm, uint32_t* size) {
  *size = group(comm).ranks();
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) {
  *rank = group(comm).rank();
  return HCCL_SUCCESS;
}

HcclResult HcclAllReduce(void* in, void* out, uint64_t count, HcclDataType dtype, HcclReduceOp op,
                         HcclComm comm, aclrtStream) {
  return collective(comm, describe("all_reduce", count, dtype, op), in, count * size_of(dtype),
                    [&](Communicator& all) { all.reduce(out, 0, count, dtype, op); });
}
HcclResult HcclReduce(void* in, void* out, uint64_t count, HcclDataType dtype, HcclReduceOp op,
                      uint32_t root, HcclComm comm, aclrtStream) {
  return collective(comm, describe("reduce", count, dtype, op, root), in, count * size_of(dtype),
                    [&](Communicator& all) {
                      if (all.rank() == root) all.reduce(out, 0, count, dtype, op);
                    });
}
HcclResult HcclReduceScatter(void* in, void* out, uint64_t count, HcclDataType dtype,
                             HcclReduceOp op, HcclComm comm, aclrtStream) {
  return collective(comm, describe("reduce_scatter", count, dtype, op), in,
                    count * size_of(dtype) * group(comm).ranks(), [&](Communicator& all) {
                      all.reduce(out, all.rank() * count, count, dtype, op);
                    });
}
HcclResult HcclAllGather(void* in, void* out, uint64_t count, HcclDataType dtype, HcclComm comm,
                         aclrtStream) {
  const size_t bytes = count * size_of(dtype);
  return collective(comm, describe("all_gather", count, dtype), in, bytes, [&](Communicator& all) {
    for (uint32_t r = 0; r < all.ranks(); ++r) all.read(r, advance(out, r * bytes), bytes, 0);
  });
}
HcclResult HcclAllGatherV(void* in, uint64_t count, void* out, const void* counts,
                          const void* offsets, HcclDataType dtype, HcclComm comm, aclrtStream) {
  const size_t size = size_of(dtype);
  const auto* each = static_cast<const uint64_t*>(counts);
  const auto* where = static_cast<const uint64_t*>(offsets);
  return collective(comm, describe("all_gather_v", 0, dtype), in, count * size,
                    [&](Communicator& all) {
                      for (uint32_t r = 0; r < all.ranks(); ++r)
                        all.read(r, advance(out, where[r] * size), each[r] * size, 0);
                    });
}
HcclResult HcclReduceScatterV(void* in, const void* counts, const void* offsets, void* out,
                              uint64_t count, HcclDataType dtype, HcclReduceOp op, HcclComm comm,
                              aclrtStream) {
  const auto* each = static_cast<const uint64_t*>(counts);
  const auto* where = static_cast<const uint64_t*>(offsets);
  const uint32_t last = group(comm).ranks() - 1;
  return collective(comm, describe("reduce_scatter_v", 0, dtype, op), in,
                    (where[last] + each[last]) * size_of(dtype), [&](Communicator& all) {
                      all.reduce(out, where[all.rank()], count, dtype, op);
                    });
}
HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType dtype, uint32_t root,
                         HcclComm comm, aclrtStream) {
  const size_t bytes = count * size_of(dtype);
  return collective(comm, describe("broadcast", count, dtype, -1, root), buffer,
                    group(comm).rank() == root ? bytes : 0, [&](Communicator& all) {
                      if (all.rank() != root) all.read(root, buffer, bytes, 0);
                    });
}
HcclResult HcclScatter(void* in, void* out, uint64_t count, HcclDataType dtype, uint32_t root,
                       HcclComm comm, aclrtStream) {
  const size_t bytes = count * size_of(dtype);
  const Communicator& me = group(comm);
  return collective(comm, describe("scatter", count, dtype, -1, root), in,
                    me.rank() == root ? bytes * me.ranks() : 0,
                    [&](Communicator& all) { all.read(root, out, bytes, all.rank() * bytes); });
}
HcclResult HcclBarrier(HcclComm comm, aclrtStream) {
  return collective(comm, describe("barrier", 0, HCCL_DATA_TYPE_INT8), nullptr, 0,
                    [](Communicator&) {});
}
HcclResult HcclAlltoAllV(const void* in, const void* counts, const void* offsets,
                         HcclDataType dtype, const void* out, const void* out_counts,
                         const void* out_offsets, HcclDataType, HcclComm comm, aclrtStream) {
  return all_to_all(comm, in, static_cast<const uint64_t*>(counts),
                    static_cast<const uint64_t*>(offsets), const_cast<void*>(out),
                    static_cast<const uint64_t*>(out_counts),
                    static_cast<const uint64_t*>(out_offsets), dtype);
}
HcclResult HcclAlltoAll(const void* in, uint64_t count, HcclDataType dtype, const void* out,
                        uint64_t, HcclDataType, HcclComm comm, aclrtStream) {
  const uint32_t ranks = group(comm).ranks();
  std::vector<uint64_t> counts(ranks, count), offsets(ranks);
  for (uint32_t r = 0; r < ranks; ++r) offsets[r] = r * count;
  return all_to_all(comm, in, counts.data(), offsets.data(), const_cast<void*>(out), counts.data(),
                    offsets.data(), dtype);
}

// Within a group, receives run at the end of the group, so that a program may call receives before
// sends.
HcclResult HcclGroupStart() {
  ++group_depth;
  return HCCL_SUCCESS;
}
HcclResult HcclGroupEnd() {
  if (--group_depth > 0) return HCCL_SUCCESS;
  const auto receives = std::move(deferred);
  deferred.clear();
  for (const auto& receive : receives)
    if (const HcclResult result = receive()) return result;
  return HCCL_SUCCESS;
}

HcclResult HcclSend(void* data, uint64_t count, HcclDataType dtype, uint32_t to, HcclComm comm,
                    aclrtStream) {
  return guarded("send", [&] { group(comm).send(to, data, count * size_of(dtype)); });
}
HcclResult HcclRecv(void* out, uint64_t count, HcclDataType dtype, uint32_t from, HcclComm comm,
                    aclrtStream) {
  const auto receive = [=] {
    return guarded("recv", [&] { group(comm).receive(from, out, count * size_of(dtype)); });
  };
  if (group_depth == 0) return receive();
  deferred.push_back(receive);
  return HCCL_SUCCESS;
}
HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm comm, aclrtStream) {
  return guarded("batch_send_recv", [&] {
    for (uint32_t pass = 0; pass < 2; ++pass)  // all sends, then all receives
      for (uint32_t i = 0; i < count; ++i) {
        const HcclSendRecvItem& item = items[i];
        const size_t bytes = item.count * size_of(item.dataType);
        if (pass == 0 && item.sendRecvType == HCCL_SEND)
          group(comm).send(item.remoteRank, item.buf, bytes);
        if (pass == 1 && item.sendRecvType == HCCL_RECV)
          group(comm).receive(item.remoteRank, item.buf, bytes);
      }
  });
}
}
