"""Visual tokens that an image keeps, as a row-stochastic pooling matrix and as the kept tokens' places."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmpipe.trainer.config.arr_coc.relevance import RelevanceConfig
from vlmpipe.trainer.features.relevance.balancer import Balance


@dataclass(frozen=True, eq=False)
class Kept:
    """Tokens that an image keeps, in raster order of their cells.

    cells: (cells, 4) first row, first column, rows and columns of each kept cell in the grid of tokens; a single token
    is one of 1 x 1. singles: (cells,) numbers of the tokens in raster order where all cells are single ones.
    """

    cells: Tensor
    grid: tuple[int, int]  # rows and columns of tokens
    singles: Tensor | None = None

    def __len__(self) -> int:
        return len(self.cells)

    @property
    def places(self) -> Tensor:
        """(cells, 2) row and column of each cell's middle token, of an even number the earlier one: its position."""
        if self.singles is not None:
            return self.cells[:, :2]
        return self.cells[:, :2] + (self.cells[:, 2:] - 1) // 2

    @property
    def index(self) -> Tensor:
        """(cells,) numbers of these tokens in raster order."""
        if self.singles is not None:
            return self.singles
        return self.places[:, 0] * self.grid[1] + self.places[:, 1]

    def matrix(self) -> Tensor:
        """(cells, tokens) row-stochastic: one-hot for a token, the mean for a larger cell."""
        rows, columns = (torch.arange(count, device=self.cells.device) for count in self.grid)
        first_row, first_column, height, width = (cell[:, None] for cell in self.cells.unbind(1))
        in_row = (rows >= first_row) & (rows < first_row + height)
        in_column = (columns >= first_column) & (columns < first_column + width)
        inside = (in_row[:, :, None] & in_column[:, None, :]).flatten(1).float()
        return inside / inside.sum(1, keepdim=True)

    def pool(self, tokens: Tensor) -> Tensor:
        """(tokens, width) -> (cells, width). Single tokens are taken as they are, bit for bit."""
        if self.singles is not None:
            return tokens.index_select(0, self.singles)
        return (self.matrix() @ tokens.float()).to(tokens.dtype)


def tokens_at(index: Tensor, grid: tuple[int, int]) -> Kept:
    """These tokens, by number in raster order. index: (tokens,), in any order."""
    return selections_at(index[None], grid)[0]


def selections_at(index: Tensor, grid: tuple[int, int]) -> list[Kept]:
    """Several selections of as many tokens each. index: (selections, tokens), see `tokens_at`."""
    ordered = index.sort(dim=1).values
    ones = torch.ones_like(ordered)
    cells = torch.stack([ordered // grid[1], ordered % grid[1], ones, ones], dim=2)
    return [Kept(of_image, grid, singles) for of_image, singles in zip(cells.unbind(), ordered.unbind(), strict=True)]


def budget(config: RelevanceConfig, compress: Tensor | float, tokens: int) -> int:
    """How many of an image's tokens are kept, between min_tokens and max_tokens by the tension `compress`."""
    least, most = config.lower_bound, config.upper_bound
    requested = most if least == most else round(most - (most - least) * float(compress))
    return min(tokens, requested)


def allocate(config: RelevanceConfig, relevance: Tensor, balance: Balance, grid: tuple[int, int], seed: int) -> Kept:
    """The selection of one image when it is not drawn for training.

    relevance: (tokens,). seed: of `random`, which depends on nothing else.
    """
    tokens, device = len(relevance), relevance.device
    everything = torch.arange(tokens, device=device)
    if config.allocation == "full":
        return tokens_at(everything, grid)
    relevance = relevance.detach()
    if config.allocation == "mass":
        shares, order = torch.softmax(relevance / balance.temperature(config).detach(), 0).sort(descending=True)
        needed = int((shares.cumsum(0) < config.mass).sum()) + 1
        return tokens_at(order[: min(tokens, max(config.lower_bound, min(needed, config.upper_bound)))], grid)
    count = budget(config, balance.compress, tokens)
    if config.allocation == "uniform":
        return tokens_at(((torch.arange(count, device=device) * 2 + 1) * tokens) // (2 * count), grid)
    if config.allocation == "random":
        drawn = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
        return tokens_at(drawn[:count].to(device), grid)
    if config.allocation == "quadtree":
        return quadtree(relevance, grid, count)
    return tokens_at(top(relevance, count), grid)


def top(scores: Tensor, count: int) -> Tensor:
    """(..., count) numbers of the largest scores; of equal ones the first, on any device."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def quadtree(relevance: Tensor, grid: tuple[int, int], most: int) -> Kept:
    """Squares that are split while `most` allows: each time the one with the most relevant token.

    Begins with the fewest squares of a power of two that cover the grid; with `most` below that, with larger ones.
    """
    rows, columns = grid
    size = 1 << max(0, math.ceil(math.log2(max(rows, columns, 1))))
    table = relevance.view(rows, columns).cpu()
    cells = [(0, 0, rows, columns, size)]

    def children(cell: tuple[int, int, int, int, int]) -> list[tuple[int, int, int, int, int]]:
        row, column, height, width, side = cell
        half = side // 2
        return [
            (row + down, column + right, min(half, height - down), min(half, width - right), half)
            for down in (0, half)
            for right in (0, half)
            if down < height and right < width
        ]

    def urgency(cell: tuple[int, int, int, int, int]) -> float:
        row, column, height, width, _ = cell
        return float(table[row : row + height, column : column + width].max())

    while splittable := [cell for cell in cells if cell[4] > 1 and len(cells) - 1 + len(children(cell)) <= most]:
        # Of equally urgent squares the largest: an even image is divided evenly.
        chosen = max(splittable, key=lambda cell: (urgency(cell), cell[4], -cell[0], -cell[1]))
        cells.remove(chosen)
        cells += children(chosen)
    made = torch.tensor([cell[:4] for cell in cells], device=relevance.device)
    allocated = Kept(made, grid)
    made = made[allocated.index.argsort()]
    is_single = bool((made[:, 2:] == 1).all())
    return Kept(made, grid, made[:, 0] * columns + made[:, 1] if is_single else None)
