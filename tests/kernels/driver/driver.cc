// Runs every kernel without Python and JAX, over awkward sizes and alignments, for the checkers.
//
//   cd cuda
//   g++ -std=c++17 -O1 -g -fsanitize=address,undefined -DJDISTADAM_NO_CLONES -ffp-contract=off
//       -fno-fast-math -I. ../tests/kernels/driver/driver.cc
//       {adam,quantized,squares,norm,sum,parts}_cpu.cc -pthread -o /tmp/driver && /tmp/driver
//   nvcc -x cu -std=c++17 -arch=native -fmad=false -DJDISTADAM_NO_CLONES -DJDISTADAM_DRIVER_CUDA
//       -Xcompiler -ffp-contract=off -I. ../tests/kernels/driver/driver.cc
//       {adam,quantized,squares,norm,sum,parts}_{cpu.cc,cuda.cu} -o /tmp/driver
//   compute-sanitizer --tool memcheck --error-exitcode 1 /tmp/driver --exact
//
// tests/kernels/test_driver.py does so.
//
// Every array stands between guard words, which must survive, as must every array that is only
// read. The CUDA kernels must give the bits of the CPU kernels; a step on parts must give those of
// a sum, a norm and a step of Adam. With --exact there are no guards: an array ends where its
// allocation ends, so that a checker sees the first byte beyond it.
// With --plant every leaf claims one element too many: the run must fail. With --one-in N one case
// in N is run, of kernels with many.

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "adam.h"
#include "adam_math.h"
#include "driver_memory.h"
#include "norm.h"
#include "parts.h"
#include "quantized.h"
#include "sum.h"

#ifdef JDISTADAM_DRIVER_CUDA
#include "kernels_cuda.h"
#include "vector.cuh"
#endif

namespace jdistadam {
namespace {

const Threads kOneThread = {1, [](std::function<void()> task) { task(); }};

uint64_t random_state = 0x9e3779b97f4a7c15u;
uint32_t Random() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return uint32_t(random_state >> 32);
}

// Bits of all kinds: half of the values moderate, the others whatever the bits say, NaN included.
std::vector<char> RandomContent(size_t size, Dtype dtype, bool nonnegative = false,
                                bool is_moderate = false) {
  std::vector<char> content(size * ItemSize(dtype));
  for (size_t i = 0; i < size; ++i) {
    const float moderate = float(Random() % 20001) / 10000.0f - 1.0f;
    float x = is_moderate || Random() % 2 ? moderate : FloatOf(Random());
    if (nonnegative) x = FloatOf(BitsOf(x) & 0x7fffffffu);
    if (dtype == Dtype::kBlock8) {
      content[i] = char(Random());
    } else if (dtype == Dtype::kUint16 || dtype == Dtype::kBlock16) {
      const auto word = uint16_t(Random());
      std::memcpy(content.data() + 2 * i, &word, 2);
    } else {
      StoreOne(content.data(), dtype, i, x);
    }
  }
  return content;
}

// A few threads that run tasks as they come; joined at the end.
class Pool {
 public:
  ~Pool() {
    for (auto& thread : threads_) thread.join();
  }
  Threads threads() {
    return {4, [this](std::function<void()> task) { threads_.emplace_back(std::move(task)); }};
  }

 private:
  std::vector<std::thread> threads_;
};

size_t planted = 0;  // elements too many
size_t one_in = 1;

// Whether the next case is one that runs.
bool IsNext() {
  static size_t number = 0;
  return number++ % one_in == 0;
}

struct Scalars {
  Coefficients rows[2] = {
      {3e-3f, 0.87f, 0.13f, 0.9973f, 0.0027f, 1e-7f, 1e-10f, 0.13f, 0.34f, 0.43f, 0.008f, 0.021f},
      {1e-2f, 0.5f, 0.5f, 0.25f, 0.75f, 1e-3f, 0.0f, 0.0f, 0.5f, 0.75f, 0.75f, 0.0f}};
  float inv_scale = 0.37f;
  bool found_inf = false;
};

template <typename T>
std::vector<char> Bytes(const T& value) {
  const char* data = reinterpret_cast<const char*>(&value);
  return {data, data + sizeof value};
}

struct AdamCase {
  Mode mode;
  int32_t flags;
  bool found_inf;
  Dtypes dtypes;
  size_t shift;  // elements that every leaf is off alignment
  std::vector<size_t> sizes;
};

// The arrays of a case before and after: grad, param, mu, nu, out of each leaf.
using Contents = std::vector<std::vector<char>>;

Contents RandomContents(const AdamCase& c) {
  Contents contents;
  const Dtypes& t = c.dtypes;
  for (const size_t n : c.sizes) {
    contents.push_back(RandomContent(n, t.grad));
    contents.push_back(RandomContent(n, t.param));
    contents.push_back(RandomContent(n, t.mu));
    contents.push_back(RandomContent(n, t.nu, true));
    contents.push_back(c.mode == Mode::kStep ? std::vector<char>() : RandomContent(n, t.out));
  }
  return contents;
}

// The sums of squares that a call takes: of runs and of single elements by turns, all leaves, and
// what is not there.
class SumsOfSquares {
 public:
  SumsOfSquares(const std::vector<size_t>& sizes, size_t shift, bool on_device) {
    std::vector<char> segments;
    const auto add = [&](size_t begin, size_t end) {
      for (const size_t x : {begin, end}) {
        const std::vector<char> bytes = Bytes(int32_t(x));
        segments.insert(segments.end(), bytes.begin(), bytes.end());
      }
      ++call_.num_segments;
    };
    for (size_t i = 0; i < sizes.size(); ++i) {
      call_.runs.push_back({call_.num_runs, i % 2 == 1});
      const size_t end = call_.num_runs + NumRuns(sizes[i], i % 2 == 1);
      add(call_.num_runs, end);
      call_.num_runs = end;
    }
    add(0, call_.num_runs + 5);
    add(size_t(-3), 2);
    const size_t off = shift * sizeof(float);
    segments_ = std::make_unique<Array>(segments, off, on_device);
    partials_ = std::make_unique<Array>(std::vector<char>(call_.num_runs * sizeof(Squares)), off,
                                        on_device);
    sums_ = std::make_unique<Array>(std::vector<char>(call_.num_segments * sizeof(Squares)), off,
                                    on_device);
    call_.segments = reinterpret_cast<const int32_t*>(segments_->data());
    call_.partials = reinterpret_cast<float*>(partials_->data());
    call_.sums = reinterpret_cast<float*>(sums_->data());
  }
  const SquaresCall& call() const { return call_; }
  // The partials may hold any NaN.
  std::vector<char> Read() const {
    (void)partials_->Read("partials");
    return sums_->Read("sums of squares");
  }

 private:
  SquaresCall call_;
  std::unique_ptr<Array> segments_, partials_, sums_;
};

Contents RunAdam(const AdamCase& c, const Contents& before, bool on_device, bool measures) {
  Scalars scalars;
  scalars.found_inf = c.found_inf;
  const Array rows(Bytes(scalars.rows), 0, on_device);
  const Array inv_scale(Bytes(scalars.inv_scale), 0, on_device);
  const Array found_inf(Bytes(scalars.found_inf), 0, on_device);
  const Dtypes& t = c.dtypes;
  const Dtype dtypes[] = {t.grad, t.param, t.mu, t.nu, t.out};
  std::vector<std::unique_ptr<Array>> arrays;
  for (size_t i = 0; i < before.size(); ++i) {
    arrays.push_back(
        std::make_unique<Array>(before[i], c.shift * ItemSize(dtypes[i % 5]), on_device));
  }
  AdamCall call{c.mode,
                c.flags,
                t,
                reinterpret_cast<const float*>(rows.data()),
                reinterpret_cast<const float*>(inv_scale.data()),
                reinterpret_cast<const bool*>(found_inf.data()),
                {}};
  for (size_t i = 0; i < c.sizes.size(); ++i) {
    const auto at = [&](size_t k) { return arrays[5 * i + k]->data(); };
    call.leaves.push_back({at(0), at(1), at(2), at(3), c.mode == Mode::kStep ? nullptr : at(4),
                           c.sizes[i] + planted, int32_t(i % 2)});
  }
  const SumsOfSquares squares(c.sizes, c.shift, on_device);
  if (measures) call.squares = squares.call();
  if (on_device) {
#ifdef JDISTADAM_DRIVER_CUDA
    Check(AdamCuda(call, nullptr));
    Check(cudaDeviceSynchronize());
#endif
  } else {
    Pool pool;
    AdamCpu(call, pool.threads());
  }
  Contents after;
  for (const auto& array : arrays) after.push_back(array->Read("adam"));
  for (size_t i = 0; i < before.size(); i += 5) {
    if (after[i] != before[i]) Fail("adam: a gradient was written");
    if (c.mode == Mode::kUpdate && after[i + 1] != before[i + 1])
      Fail("adam: an update wrote a parameter");
  }
  if (measures) after.push_back(squares.Read());
  return after;
}

struct QuantizedCase {
  AdamCase adam;
  bool is_random;
  int32_t part;
};

// A step with 8 bits or at random; beside the arrays of AdamCase each leaf has two of scales.
Contents RunQuantized(const QuantizedCase& c, const Contents& before, bool on_device,
                      bool measures) {
  Scalars scalars;
  scalars.found_inf = c.adam.found_inf;
  const Array rows(Bytes(scalars.rows), 0, on_device);
  const Array inv_scale(Bytes(scalars.inv_scale), 0, on_device);
  const Array found_inf(Bytes(scalars.found_inf), 0, on_device);
  const Array key(Bytes(uint64_t{0x123456789abcdef0}), 0, on_device);
  const Array count(Bytes(int32_t{77}), 0, on_device);
  std::vector<char> numbers, entries;
  const auto add = [](std::vector<char>* all, const std::vector<char>& more) {
    all->insert(all->end(), more.begin(), more.end());
  };
  std::vector<size_t> tables;
  for (const size_t size : c.adam.sizes) {
    add(&numbers, Bytes(c.part));
    add(&numbers, Bytes(c.part / 2));
    tables.push_back(entries.size() / sizeof(uint32_t));
    for (size_t i = 0; i < size; i += kBlockSize) {
      add(&entries, Bytes(uint32_t(size + i)));
      add(&entries, Bytes(uint32_t(i * i)));
    }
  }
  const Array parts(numbers, 0, on_device), blocks(entries, 0, on_device);
  const Dtypes& t = c.adam.dtypes;
  const Dtype dtypes[] = {t.grad, t.param, t.mu, t.nu, t.out, Dtype::kFloat32, Dtype::kFloat32};
  std::vector<std::unique_ptr<Array>> arrays;
  for (size_t i = 0; i < before.size(); ++i) {
    arrays.push_back(
        std::make_unique<Array>(before[i], c.adam.shift * ItemSize(dtypes[i % 7]), on_device));
  }
  QuantizedCall call{{c.adam.mode,
                      c.adam.flags,
                      t,
                      reinterpret_cast<const float*>(rows.data()),
                      reinterpret_cast<const float*>(inv_scale.data()),
                      reinterpret_cast<const bool*>(found_inf.data()),
                      {}},
                     c.is_random,
                     reinterpret_cast<const uint32_t*>(key.data()),
                     reinterpret_cast<const int32_t*>(count.data()),
                     reinterpret_cast<const int32_t*>(parts.data()),
                     {}};
  for (size_t i = 0; i < c.adam.sizes.size(); ++i) {
    const auto at = [&](size_t k) { return arrays[7 * i + k]->data(); };
    const Leaf leaf{at(0),
                    at(1),
                    at(2),
                    at(3),
                    c.adam.mode == Mode::kStep ? nullptr : at(4),
                    c.adam.sizes[i] + planted,
                    int32_t(i % 2)};
    // A run, pieces of two cuts, or several leaves in one.
    const bool in_pieces = i % 3 == 1, in_blocks = i % 3 == 2;
    const Cut run{leaf.size, leaf.size}, pieces{kBlockSize, 3 * kBlockSize};
    const uint32_t* table = reinterpret_cast<const uint32_t*>(blocks.data()) + tables[i];
    call.leaves.push_back({leaf,
                           reinterpret_cast<float*>(at(5)),
                           reinterpret_cast<float*>(at(6)),
                           in_blocks ? table : nullptr,
                           {in_pieces ? pieces : run, in_pieces ? pieces : run},
                           uint32_t(i),
                           uint32_t(i)});
  }
  const SumsOfSquares squares(c.adam.sizes, c.adam.shift, on_device);
  if (measures) call.adam.squares = squares.call();
  if (on_device) {
#ifdef JDISTADAM_DRIVER_CUDA
    Check(QuantizedCuda(call, nullptr));
    Check(cudaDeviceSynchronize());
#endif
  } else {
    Pool pool;
    QuantizedCpu(call, pool.threads());
  }
  Contents after;
  for (const auto& array : arrays) after.push_back(array->Read("quantized"));
  for (size_t i = 0; i < before.size(); i += 7) {
    if (after[i] != before[i]) Fail("quantized: a gradient was written");
  }
  if (measures) after.push_back(squares.Read());
  return after;
}

std::vector<char> RunNorm(Dtype dtype, const Contents& grads, size_t shift, bool on_device) {
  const Array inv_scale(Bytes(0.37f), 0, on_device);
  std::vector<std::unique_ptr<Array>> arrays;
  NormTilesCall call{dtype, reinterpret_cast<const float*>(inv_scale.data()), {}, 0, nullptr};
  for (const auto& grad : grads) {
    const size_t size = grad.size() / ItemSize(dtype) + planted;
    arrays.push_back(std::make_unique<Array>(grad, shift * ItemSize(dtype), on_device));
    call.leaves.push_back({arrays.back()->data(), size, call.num_tiles});
    call.num_tiles += NumNormTiles(size);
  }
  const Array tiles(std::vector<char>(call.num_tiles * sizeof(TileNorm)), 0, on_device);
  const Array sum(Bytes(0.0f), 0, on_device), found_inf(Bytes(false), 0, on_device);
  call.tiles = reinterpret_cast<TileNorm*>(tiles.data());
  const NormCall total{call.tiles, call.num_tiles, reinterpret_cast<float*>(sum.data()),
                       reinterpret_cast<bool*>(found_inf.data())};
  if (on_device) {
#ifdef JDISTADAM_DRIVER_CUDA
    Check(NormTilesCuda(call, nullptr));
    Check(NormCuda(total, nullptr));
    Check(cudaDeviceSynchronize());
#endif
  } else {
    Pool pool;
    NormTilesCpu(call, pool.threads());
    NormCpu(total);
  }
  tiles.Read("tiles");
  std::vector<char> result = sum.Read("sum of squares");
  result.push_back(found_inf.Read("found_inf")[0]);
  return result;
}

Contents RunSum(Dtype in, Dtype out, int contributions, const Contents& inputs, size_t shift,
                bool on_device) {
  std::vector<std::unique_ptr<Array>> arrays;
  SumCall call{in, out, contributions, 0, {}};
  for (const auto& input : inputs) {
    const size_t size = input.size() / ItemSize(in) / size_t(contributions);
    arrays.push_back(std::make_unique<Array>(input, shift * ItemSize(in), on_device));
    const char* data = arrays.back()->data();
    arrays.push_back(std::make_unique<Array>(std::vector<char>(size * ItemSize(out)),
                                             shift * ItemSize(out), on_device));
    call.leaves.push_back({size == 3 ? nullptr : data, arrays.back()->data(), size + planted});
  }
  if (on_device) {
#ifdef JDISTADAM_DRIVER_CUDA
    Check(SumCuda(call, nullptr));
    Check(cudaDeviceSynchronize());
#endif
  } else {
    Pool pool;
    SumCpu(call, pool.threads());
  }
  Contents after;
  for (const auto& array : arrays) after.push_back(array->Read("sum"));
  return after;
}

struct Runs {
  size_t rows, run;
};

struct PartsCase {
  PartsWork work;
  int32_t flags;
  bool found_inf;
  PartsDtypes dtypes;
  int count, me;
  bool is_out_whole;
  size_t shift;
  std::vector<Runs> shards;
};

struct PartsScalars : Scalars {
  float norm_scale = 0.21f;
};

// The arrays of each leaf, in the order of PartsLeaf, and last all tiles. The norm of moderate
// values is finite: it shows which tile has which sum.
constexpr size_t kPartsArrays = 7;
Contents RandomParts(const PartsCase& c, bool is_moderate) {
  const PartsDtypes& t = c.dtypes;
  const size_t n = size_t(c.count);
  Contents contents;
  size_t tiles = 0;
  for (const Runs& shard : c.shards) {
    const size_t size = shard.rows * shard.run;
    const auto add = [&](size_t elements, Dtype dtype, bool nonnegative = false) {
      contents.push_back(RandomContent(elements, dtype, nonnegative, is_moderate));
    };
    add(n * size, t.grad);
    add((n - 1) * size, t.grad);
    add(size, Dtype::kFloat32);
    add(size, Dtype::kFloat32);
    add(size, t.mu);
    add(size, t.nu, true);
    add(size * (c.is_out_whole ? n : 1), t.out);
    tiles += NumNormTiles(size + planted);
  }
  contents.push_back(std::vector<char>(tiles * sizeof(TileNorm), 7));
  return contents;
}

// They may hold any NaN.
void MakeNansCanonical(std::vector<char>* tiles) {
  for (size_t i = 0; i < tiles->size(); i += sizeof(TileNorm)) {
    TileNorm tile;
    std::memcpy(&tile, tiles->data() + i, sizeof tile);
    tile.sum_of_squares = CanonicalNan(tile.sum_of_squares);
    std::memcpy(tiles->data() + i, &tile, sizeof tile);
  }
}

PartsCall PartsCallOf(const PartsCase& c, const std::vector<std::unique_ptr<Array>>& arrays) {
  PartsCall call{};
  call.work = c.work, call.flags = c.flags, call.dtypes = c.dtypes;
  call.count = c.count, call.me = c.me, call.is_out_whole = c.is_out_whole;
  call.tiles = reinterpret_cast<TileNorm*>(arrays.back()->data());
  const bool is_step = c.work != PartsWork::kSum, has_parts = c.work != PartsWork::kStepOnSums;
  for (size_t i = 0; i < c.shards.size(); ++i) {
    const auto at = [&](size_t k, bool is_used) {
      return is_used ? arrays[kPartsArrays * i + k]->data() : nullptr;
    };
    PartsLeaf leaf{};
    leaf.own = at(0, has_parts), leaf.received = at(1, has_parts && c.count > 1);
    leaf.sum = reinterpret_cast<float*>(at(2, c.work != PartsWork::kStep));
    leaf.main = reinterpret_cast<float*>(at(3, is_step));
    leaf.mu = at(4, is_step), leaf.nu = at(5, is_step), leaf.out = at(6, is_step);
    leaf.size = c.shards[i].rows * c.shards[i].run + planted;
    leaf.run = planted ? leaf.size : c.shards[i].run;
    leaf.first_tile = call.num_tiles, leaf.group = int32_t(i % 2);
    call.num_tiles += NumNormTiles(leaf.size);
    call.leaves.push_back(leaf);
  }
  return call;
}

Contents RunParts(const PartsCase& c, const Contents& before, bool on_device) {
  PartsScalars scalars;
  scalars.found_inf = c.found_inf;
  const Array rows(Bytes(scalars.rows), 0, on_device);
  const Array inv_scale(Bytes(scalars.inv_scale), 0, on_device);
  const Array norm_scale(Bytes(scalars.norm_scale), 0, on_device);
  const Array found_inf(Bytes(scalars.found_inf), 0, on_device);
  const PartsDtypes& t = c.dtypes;
  const Dtype dtypes[kPartsArrays] = {t.grad, t.grad, Dtype::kFloat32, Dtype::kFloat32, t.mu,
                                      t.nu,   t.out};
  std::vector<std::unique_ptr<Array>> arrays;
  for (size_t i = 0; i < before.size(); ++i) {
    const size_t shift = i + 1 == before.size() ? 0 : c.shift * ItemSize(dtypes[i % kPartsArrays]);
    arrays.push_back(std::make_unique<Array>(before[i], shift, on_device));
  }
  PartsCall call = PartsCallOf(c, arrays);
  call.coefficients = reinterpret_cast<const float*>(rows.data());
  call.inv_scale = reinterpret_cast<const float*>(inv_scale.data());
  call.norm_scale = reinterpret_cast<const float*>(norm_scale.data());
  call.found_inf = reinterpret_cast<const bool*>(found_inf.data());
  if (on_device) {
#ifdef JDISTADAM_DRIVER_CUDA
    Check(PartsCuda(call, nullptr));
    Check(cudaDeviceSynchronize());
#endif
  } else {
    Pool pool;
    PartsCpu(call, pool.threads());
  }
  Contents after;
  for (const auto& array : arrays) after.push_back(array->Read("parts"));
  MakeNansCanonical(&after.back());
  return after;
}

// Calls copy(in the shard, in the leaf, bytes) for the runs of shard `me`.
template <typename Copy>
void ForRuns(const Runs& shard, int count, int me, size_t item, const Copy& copy) {
  const size_t bytes = shard.run * item;
  for (size_t row = 0; row < shard.rows; ++row)
    copy(row * bytes, (row * size_t(count) + size_t(me)) * bytes, bytes);
}

// The parts of all devices, in sequence.
std::vector<char> AllParts(const PartsCase& c, const Runs& shard, const std::vector<char>& own,
                           const std::vector<char>& received) {
  const size_t item = ItemSize(c.dtypes.grad), part = shard.rows * shard.run * item;
  const auto middle = received.begin() + long(size_t(c.me) * part);
  std::vector<char> parts(received.begin(), middle), mine(part);
  ForRuns(shard, c.count, c.me, item, [&](size_t to, size_t from, size_t bytes) {
    std::memcpy(mine.data() + to, own.data() + from, bytes);
  });
  parts.insert(parts.end(), mine.begin(), mine.end());
  parts.insert(parts.end(), middle, received.end());
  return parts;
}

// What RunParts must find, by the kernels of a sum, of a norm and of a step.
Contents ExpectedParts(const PartsCase& c, Contents arrays) {
  PartsScalars scalars;
  const PartsDtypes& t = c.dtypes;
  constexpr Dtype f = Dtype::kFloat32;
  SumCall sum{t.grad, f, c.count, 0, {}};
  NormTilesCall norm{f, &scalars.norm_scale, {}, 0, nullptr};
  AdamCall adam{Mode::kStepAndCast,
                c.flags,
                {f, f, t.mu, t.nu, t.out},
                reinterpret_cast<const float*>(scalars.rows),
                &scalars.inv_scale,
                &c.found_inf,
                {}};
  const size_t leaves = c.shards.size();
  Contents parts(leaves), sums(leaves), outs(leaves);
  for (size_t i = 0; i < leaves; ++i) {
    const size_t size = c.shards[i].rows * c.shards[i].run;
    const auto array = [&](size_t k) { return arrays[kPartsArrays * i + k].data(); };
    parts[i] = AllParts(c, c.shards[i], arrays[kPartsArrays * i], arrays[kPartsArrays * i + 1]);
    sums[i] = arrays[kPartsArrays * i + 2];
    outs[i].resize(size * ItemSize(t.out));
    sum.leaves.push_back({parts[i].data(), sums[i].data(), size});
    norm.leaves.push_back({sums[i].data(), size, norm.num_tiles});
    norm.num_tiles += NumNormTiles(size);
    adam.leaves.push_back(
        {sums[i].data(), array(3), array(4), array(5), outs[i].data(), size, int32_t(i % 2)});
  }
  norm.tiles = reinterpret_cast<TileNorm*>(arrays.back().data());
  if (c.work != PartsWork::kStepOnSums) SumCpu(sum, kOneThread), NormTilesCpu(norm, kOneThread);
  if (c.work != PartsWork::kSum) AdamCpu(adam, kOneThread);
  MakeNansCanonical(&arrays.back());
  for (size_t i = 0; i < leaves; ++i) {
    if (c.work == PartsWork::kSum) {
      arrays[kPartsArrays * i + 2] = sums[i];
      continue;
    }
    const int count = c.is_out_whole ? c.count : 1, me = c.is_out_whole ? c.me : 0;
    char* out = arrays[kPartsArrays * i + 6].data();
    ForRuns(c.shards[i], count, me, ItemSize(t.out), [&](size_t from, size_t to, size_t bytes) {
      std::memcpy(out + to, outs[i].data() + from, bytes);
    });
  }
  return arrays;
}

// Runs on the CPU and, where it is compiled in, on the GPU: the bits must be the same.
template <typename Run>
void Compare(const std::string& name, const Run& run) {
  const auto cpu = run(false);
#ifdef JDISTADAM_DRIVER_CUDA
  if (run(true) != cpu) Fail(name + ": CUDA and CPU differ in bits");
#else
  (void)cpu;
  (void)name;
#endif
}

constexpr Dtype F = Dtype::kFloat32, B = Dtype::kBfloat16, H = Dtype::kFloat16, U = Dtype::kUint16,
                E = Dtype::kBlock8, S = Dtype::kBlock16;
const std::vector<size_t> kSizes = {0, 1, 3, 4, 7, 8, 31, 127, 128, 511, 513, 1025, 33000};

void RunAllAdam() {
  const Dtypes combinations[] = {{F, F, F, F, F}, {B, F, F, F, B}, {B, B, B, B, B},
                                 {H, F, B, F, H}, {F, H, H, F, F}, {B, F, B, B, H}};
  const Dtypes split[] = {{B, B, F, F, U}, {F, B, B, B, U}, {B, B, B, B, U}, {H, B, F, F, U}};
  const auto run = [](const AdamCase& c) {
    if (!IsNext()) return;
    const Contents before = RandomContents(c);
    for (const bool measures : {false, true}) {
      if (measures && c.mode == Mode::kUpdate) continue;
      Compare("adam", [&](bool on_device) { return RunAdam(c, before, on_device, measures); });
    }
  };
  for (const size_t shift : {0, 1, 3}) {
    for (const bool found_inf : {false, true}) {
      for (const int32_t flags : {0, kNesterov}) {
        for (const Mode mode : {Mode::kStep, Mode::kStepAndCast, Mode::kUpdate}) {
          for (const Dtypes& t : combinations) run({mode, flags, found_inf, t, shift, kSizes});
        }
      }
      for (const Dtypes& t : split)
        run({Mode::kStepSplit, shift == 1 ? kAllFlags : kCautious, found_inf, t, shift, kSizes});
    }
  }
  for (const size_t leaves : {59, 60, 61, 500, 501, 1100}) {  // around the tables' capacities
    std::vector<size_t> sizes;
    for (size_t i = 0; i < leaves; ++i) sizes.push_back(Random() % 70);
    run({Mode::kStep, false, false, {F, F, F, F, F}, 0, sizes});
  }
}

void RunAllQuantized() {
  const auto run = [](const QuantizedCase& c) {
    if (!IsNext()) return;
    const Contents arrays = RandomContents(c.adam);
    Contents before;
    for (size_t i = 0; i < arrays.size(); ++i) {
      before.push_back(arrays[i]);
      if (i % 5 != 4) continue;
      const size_t blocks = (c.adam.sizes[i / 5] + kBlockSize - 1) / kBlockSize;
      before.push_back(RandomContent(blocks, Dtype::kFloat32));
      before.push_back(RandomContent(blocks, Dtype::kFloat32));
    }
    for (const bool measures : {false, true}) {
      if (measures && c.adam.mode == Mode::kUpdate) continue;
      Compare("quantized",
              [&](bool on_device) { return RunQuantized(c, before, on_device, measures); });
    }
  };
  const Dtypes moments[] = {{F, B, E, E, B}, {B, B, E, E, B}, {B, F, E, E, B}, {F, F, E, E, F},
                            {B, B, B, B, B}, {H, H, H, B, H}, {F, H, E, F, B}, {B, F, B, E, H},
                            {B, B, S, S, B}, {F, F, S, E, B}, {B, F, E, S, H}};
  for (const size_t shift : {0, 1, 3}) {
    for (const bool is_random : {false, true}) {
      for (const bool found_inf : {false, true}) {
        for (Dtypes t : moments) {
          // Part 2^30 begins at a multiple of 2^30 elements: beyond 32 bits in most leaves.
          const int32_t part = shift == 0 ? 0 : 1 << 30;
          for (const Mode mode :
               {Mode::kStep, Mode::kStepAndCast, Mode::kUpdate, Mode::kStepSplit}) {
            if (mode == Mode::kStepSplit) t.param = B, t.out = U;
            run({{mode, shift == 1 ? kAllFlags : kCautious, found_inf, t, shift, kSizes},
                 is_random,
                 part});
          }
        }
      }
    }
  }
  for (const size_t leaves : {29, 30, 31, 250, 251, 600}) {  // around the tables' capacities
    std::vector<size_t> sizes;
    for (size_t i = 0; i < leaves; ++i) sizes.push_back(Random() % 300);
    run({{Mode::kStep, false, false, {B, B, E, E, B}, 0, sizes}, true, 0});
  }
}

void RunAllLists() {
  for (const size_t shift : {0, 1, 3}) {
    for (const Dtype in : {F, B, H}) {
      Contents grads;
      for (const size_t n : kSizes) grads.push_back(RandomContent(n, in));
      Compare("norm", [&](bool on_device) { return RunNorm(in, grads, shift, on_device); });
      for (const Dtype out : {F, B, H}) {
        for (const int contributions : {1, 2, 3, 4, 5, 8}) {
          if (!IsNext()) continue;
          Contents inputs;
          for (const size_t n : kSizes)
            inputs.push_back(RandomContent(n * size_t(contributions), in));
          Compare("sum", [&](bool on_device) {
            return RunSum(in, out, contributions, inputs, shift, on_device);
          });
        }
      }
    }
  }
}

void RunPartsCase(const PartsCase& c) {
  if (!IsNext()) return;
  const Contents before = RandomParts(c, Random() % 2 == 0);
  Compare("parts", [&](bool on_device) {
    Contents after = RunParts(c, before, on_device);
    if (!on_device && after != ExpectedParts(c, before))
      Fail("parts: the bits are not those of a sum, a norm and a step");
    return after;
  });
}

// Runs that are and are not whole vectors; shards around a row, a tile, and a task of the CPU.
const std::vector<Runs> kShards = {{1, 1},    {3, 1},    {2, 2},    {2, 4},    {1, 7},
                                   {5, 12},   {3, 31},   {1, 128},  {1, 1025}, {7, 73},
                                   {2, 4096}, {1, 8193}, {2, 4099}, {4, 4100}};

void RunAllParts() {
  const PartsDtypes combinations[] = {{F, F, F, F}, {F, F, F, B}, {B, F, F, B}, {B, B, B, B},
                                      {H, F, B, H}, {F, H, F, H}, {B, F, H, F}};
  for (const size_t shift : {0, 1, 3}) {
    for (const PartsWork work : {PartsWork::kSum, PartsWork::kStep, PartsWork::kStepOnSums}) {
      for (const PartsDtypes& t : combinations) {
        for (const int count : {1, 2, 3, 4, 5, 8}) {
          const int32_t flags = Random() % 2 ? 0 : Random() % 2 ? kAllFlags : kNesterov;
          const bool found_inf = Random() % 4 == 0, is_out_whole = Random() % 2 == 0;
          const int me = int(Random() % uint32_t(count));
          RunPartsCase({work, flags, found_inf, t, count, me, is_out_whole, shift, kShards});
        }
      }
    }
  }
  for (const size_t leaves : {352, 353, 354, 710}) {  // around the tables' capacity
    std::vector<Runs> shards;
    for (size_t i = 0; i < leaves; ++i) shards.push_back({1 + Random() % 3, 1 + Random() % 20});
    for (const PartsWork work : {PartsWork::kSum, PartsWork::kStep, PartsWork::kStepOnSums})
      RunPartsCase({work, 0, false, {B, F, F, B}, 4, int(leaves % 4), true, 0, shards});
  }
}

// Shards without memory: of 2^32 elements and more as well.
void CheckWholeIndex() {
  for (const size_t size :
       {size_t{12}, size_t{3} << 30, (size_t{1} << 32) - 4, size_t{1} << 32, size_t{9} << 40}) {
    for (const size_t rows : {1, 2, 4}) {
      const size_t run = size / rows;
      for (const int count : {1, 3, 64}) {
        for (const int me : {0, count / 2, count - 1}) {
          for (const size_t row : {size_t{0}, rows / 2, rows - 1}) {
            for (const size_t column : {size_t{0}, run / 3, run - 1}) {
              const size_t want = (row * size_t(count) + size_t(me)) * run + column;
              if (WholeIndex(run * rows, run, count, me, row * run + column) != want)
                Fail("WholeIndex of a shard of " + std::to_string(size));
            }
          }
        }
      }
    }
  }
}

#ifdef JDISTADAM_DRIVER_CUDA
// The hardware's conversions against dtype.h for all 2^32 floats but NaN.
__global__ void CompareConversions(uint32_t first, unsigned long long* wrong) {
  const uint32_t bits = first + 4 * (blockIdx.x * blockDim.x + threadIdx.x);
  float x[4];
  alignas(8) uint16_t bfloat16[4], float16[4];
  bool special = false;
  for (int k = 0; k < 4; ++k) {
    x[k] = FloatOf(bits + k);
    special |= x[k] != x[k];
  }
  if (special) return;
  StoreVector<4>(bfloat16, Dtype::kBfloat16, 0, x);
  StoreVector<4>(float16, Dtype::kFloat16, 0, x);
  for (int k = 0; k < 4; ++k) {
    if (bfloat16[k] != ToBfloat16(x[k]) || float16[k] != ToFloat16(x[k])) atomicAdd(wrong, 1);
  }
}

void CompareAllConversions() {
  unsigned long long *wrong, host = 0;
  Check(cudaMalloc(&wrong, sizeof *wrong));
  Check(cudaMemset(wrong, 0, sizeof *wrong));
  for (uint64_t first = 0; first < uint64_t{1} << 32; first += 1 << 28)
    CompareConversions<<<(1 << 28) / 4 / 256, 256>>>(uint32_t(first), wrong);
  Check(cudaMemcpy(&host, wrong, sizeof host, cudaMemcpyDeviceToHost));
  cudaFree(wrong);
  if (host != 0) Fail(std::to_string(host) + " conversions differ from the hardware's");
}
#endif

}  // namespace
}  // namespace jdistadam

int main(int argc, char** argv) {
  using namespace jdistadam;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--exact") exact = true;
    if (option == "--plant") planted = 1;
    if (option == "--one-in" && i + 1 < argc) one_in = std::stoul(argv[i + 1]);
  }
  RunAllAdam();
  RunAllQuantized();
  RunAllLists();
  CheckWholeIndex();
  RunAllParts();
#ifdef JDISTADAM_DRIVER_CUDA
  if (!exact) CompareAllConversions();  // minutes under a checker
#endif
  std::printf(failures == 0 ? "SUCCESS\n" : "%d FAILURES\n", failures);
  return failures == 0 ? 0 : 1;
}
