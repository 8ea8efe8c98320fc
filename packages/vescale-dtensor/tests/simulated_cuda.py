"""A CUDA device small enough to run its random kernels thread by thread, on the CPU, with a real Philox generator.

Written from the loops of the kernels, not from the formulas under test: every thread has its own counter.
"""

import numpy as np
import torch

from vescale.dtensor._random.cuda_replay.geometry import Grid

MASK = np.uint64(0xFFFFFFFF)
ATEN = torch.ops.aten


def philox(seed, subsequence, block):
    """Four words for each thread: counter (block, subsequence), key (seed), ten rounds."""
    high = np.uint64(32)
    c = [block & MASK, block >> high, subsequence & MASK, subsequence >> high]
    k = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)]
    for _ in range(10):
        one, two = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(two >> high) ^ c[1] ^ k[0], two & MASK, (one >> high) ^ c[3] ^ k[1], one & MASK]
        k = [(k[0] + np.uint64(0x9E3779B9)) & MASK, (k[1] + np.uint64(0xBB67AE85)) & MASK]
    return c


def uniform(word):
    return word.astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)


class Generator:
    """Seed and offset, with the checks of a CUDA generator."""

    def __init__(self, seed=0x1234_5678_9ABC, offset=8):
        self.seed, self.offset = seed, offset

    def initial_seed(self):
        return self.seed

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        assert offset >= 0
        assert offset % 4 == 0
        self.offset = offset

    def take(self, increment):
        offset = self.offset
        self.offset += -(-increment // 4) * 4
        return offset // 4


class Simulated:
    """A backend. `widest_bytes` bounds the vectorized reads; `launches` logs the elements of each kernel."""

    def __init__(self, *, num_sms=3, threads_per_sm=4, block=4, index_limit=2**31 - 1, widest=8):
        self.shape = Grid(num_sms, threads_per_sm, block, index_limit)
        self.widest = widest
        self.default = Generator()
        self.capturing = False
        self.launches = []

    def serves(self, device):
        return device.type == "cpu"

    def name(self, device):
        return f"simulated {device.type}"

    def grid(self, device):
        assert device.type == "cpu"
        return self.shape

    def generator(self, device, generator):
        assert device.type == "cpu"
        if isinstance(generator, torch.Generator):  # one of another device
            return None
        return self.default if generator is None else generator

    def is_capturing(self):
        return self.capturing

    def threads(self, numel):
        blocks = self.shape.num_sms * (self.shape.threads_per_sm // self.shape.block)
        return self.shape.block * min(blocks, -(-numel // self.shape.block))

    # ----------------------------------------------------------------------------------------------- fills

    def fill(self, op, tensor, args, kwargs, generator):
        assert tensor.is_contiguous()
        assert not kwargs
        if not tensor.numel():
            return
        wide = tensor.dtype == torch.float64 or (tensor.dtype == torch.int64 and (not args or args[-1] >= 2**28))
        self._fill(op, tensor.view(-1), args, 2 if wide else 4, generator)

    def _fill(self, op, tensor, args, values, generator):
        numel, threads = tensor.numel(), self.threads(tensor.numel())
        self.launches.append(numel)
        block = generator.take(((numel - 1) // (threads * values) + 1) * 4)
        if not self._fits(tensor):
            ranges, leaves = [tensor], []
            while ranges:
                last = ranges.pop()
                half = last.numel() // 2
                ranges += [] if self._fits(last) else [last[half:], last[:half]]
                leaves += [last] if self._fits(last) else []
            for leaf in leaves:
                self._fill(op, leaf, args, values, generator)
            return
        linear = np.arange(threads, dtype=np.int64)
        counters = np.full(threads, block, np.uint64)
        out = tensor.numpy()
        rounded = ((numel - 1) // (threads * values) + 1) * threads * values
        while linear[0] < rounded:
            words = philox(generator.seed, np.arange(threads, dtype=np.uint64), counters)
            counters += np.uint64(1)
            for lane in range(values):
                index = linear + threads * lane
                word = words[lane] if values == 4 else words[2 * lane] << np.uint64(32) | words[2 * lane + 1]
                out[index[index < numel]] = self._transform(op, word, out.dtype, args)[index < numel]
            linear += threads * values

    def _fits(self, tensor):
        return 1 + (tensor.numel() - 1) * tensor.element_size() <= self.shape.index_limit

    @staticmethod
    def _transform(op, word, dtype, args):
        if dtype == np.int64:
            return (word % np.uint64(args[-1] if args else 2**63)).astype(np.int64)
        if dtype == np.float64:
            return word.astype(np.float64) * 2.0**-64 + 2.0**-65
        if op is ATEN.bernoulli_.float:
            return uniform(word) < args[0]
        return uniform(word) * np.float32(args[-1] if args else 1)

    # ----------------------------------------------------------------------------------------------- dropout

    def dropout(self, tensor, p):
        numel, threads, out = tensor.numel(), self.threads(tensor.numel()), torch.empty_like(tensor)
        self.launches.append(numel)
        block = self.default.take(((numel - 1) // (threads * 4) + 1) * 4)
        vector = self._vector(tensor)
        drawn = np.empty(numel, np.float32)
        if vector == 1:
            drawn = torch.empty(numel)
            whole = Generator(self.default.seed, block * 4)
            self._fill(ATEN.uniform_.default, drawn, (), 4, whole)
            self.launches.pop()
            drawn = drawn.numpy()
        else:
            linear = np.arange(threads, dtype=np.int64) * vector
            counters = np.full(threads, block, np.uint64)
            while linear[0] < numel:
                for first in range(0, vector, 4):
                    words = philox(self.default.seed, np.arange(threads, dtype=np.uint64), counters)
                    counters += np.uint64(1)
                    for lane in range(min(vector, 4)):
                        index = linear + first + lane
                        drawn[index[index < numel]] = uniform(words[lane])[index < numel]
                linear += threads * vector
        mask = torch.empty_like(tensor, dtype=torch.bool)
        mask.copy_(torch.from_numpy(drawn < np.float32(1 - p)).view(tensor.shape))
        out.copy_(tensor * mask * (1 / (1 - p)))
        return out, mask

    def _vector(self, tensor):
        dense = tensor.numel() == 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        if not dense:
            return 1
        size, itemsize = min(16 // tensor.element_size(), self.widest), tensor.element_size()
        while tensor.data_ptr() % (size * itemsize):
            size //= 2
        while tensor.numel() % size:
            size //= 2
        assert size == 1 or tensor.is_contiguous()  # memory order is not simulated
        return size

    # ----------------------------------------------------------------------------------------------- bernoulli

    def bernoulli(self, out, p, generator):
        block, numel = generator.take(10), out.numel()
        threads = np.arange(-(-numel // 4), dtype=np.uint64)
        words = philox(generator.seed, threads, np.full(len(threads), block, np.uint64))
        drawn = np.stack([uniform(word) for word in words], axis=1).reshape(-1)[:numel]
        precise = torch.float64 if out.dtype == torch.float64 else torch.float32
        out.view(-1).copy_(torch.from_numpy(drawn) <= p.reshape(-1).to(precise))
