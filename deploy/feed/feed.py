"""Open calibration data for a model: images or arrays, read one sample at a time.

Sources: a folder, a list file ("path" or "path label"), a pattern or a COCO json of images or of
files of preprocessed arrays, a `loader.py:function`, a TensorRT calibrator, or Python objects:
arrays, paths, and loaders or datasets that yield them. Kinds of sources, as in manifests::

    files of arrays, Python's items, a calibrator's batches   ->  arrays
    images, a video's frames                                  ->  images
    Python's items that hold pixels, to be preprocessed       ->  pictures in memory

Images are decoded in the background by one thread per core, 4 at most: a slow model does not wait
for them, and slow decoding leaves no core idle.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from deploy.errors import ConfigError, FeedError
from deploy.feed.array_files import open_array_files
from deploy.feed.arrays import ArraySource, count_samples
from deploy.feed.batch_axis import AUTO, Specs, mark_batch_axes, samples_per_run
from deploy.feed.calibrator import CalibratorScript
from deploy.feed.images import printable_name, summarize_names
from deploy.feed.loaders import (
    call_loader,
    first_item_fits,
    is_loader_spec,
    iterate_items,
    open_iterable,
    preprocess_items,
)
from deploy.feed.model_preprocess import MetadataPreprocess, ResolvedPreprocess, resolve_preprocess
from deploy.feed.paths import (
    RawFiles,
    SourceFiles,
    Split,
    label_by_folder,
    refuse_files_with_header,
    resolve_files,
    resolve_path_list,
)
from deploy.feed.preprocess import Preprocess, PreprocessRequest, describe, describe_preprocess
from deploy.feed.sample_reader import refuse_batches
from deploy.feed.samples import Feed
from deploy.feed.sampling import Choice, Limit, to_choice
from deploy.feed.sources import (
    DEFAULT_MAX_PIXELS,
    ImageSource,
    SampleSource,
    VideoSource,
    check_dtype,
    check_present,
    is_video,
)
from deploy.feed.states import Recurrence, SequenceSource, choose_steps
from deploy.files.guard import add_input_file, add_input_files
from deploy.files.reading import refuse_no_path
from deploy.tensors import TensorSpec
from deploy.terminal import phase


class IndexedItems(Protocol):
    """Items by index, as a data set of PyTorch has them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class ItemReader(Protocol):
    """Items one after the other, and None at the end, as ONNX Runtime's calibration reader."""

    def get_next(self) -> Any:
        """Return the next item; None at the end."""


FeedSource = (
    str
    | os.PathLike[str]
    | RawFiles
    | CalibratorScript
    | Iterable[Any]
    | Callable[[], Any]
    | IndexedItems
    | ItemReader
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Images or arrays, and how they are chosen, read and prepared.

    Attributes:
        source: see the docstring of `deploy.feed.feed`.
        preprocess: how images become inputs, or some options of it by name; the model's metadata,
            else its input, decides the rest.
        skip_bad: skip unreadable images and arrays with NaN instead of raising.
        limit: use at most this number of samples, or a `Choice` of them; None uses all.
        split: which images of a data.yaml are used.
        batch_axis: "0" if the first dimension of the inputs is a batch, "none" if it is part of a
            sample; "auto" decides by the shapes of the model and of the samples.
        states: state input -> the output that the next step of a sequence gets there; states that
            names and shapes show need not be listed.
        max_pixels: pixels that an image may have; decoding takes three bytes each.
    """

    source: FeedSource
    preprocess: PreprocessRequest = None
    skip_bad: bool = False
    limit: Limit = None
    split: Split = "train"
    batch_axis: str = AUTO
    states: Mapping[str, str] = field(default_factory=dict)
    max_pixels: int = DEFAULT_MAX_PIXELS

    @phase("opening the samples")
    def open(
        self,
        specs: Sequence[TensorSpec],
        *,
        metadata_preprocess: MetadataPreprocess | None = None,
        labels_by_folder: bool = False,
        recurrence: Recurrence | None = None,
    ) -> Feed:
        """Open the samples for a model.

        Args:
            specs: the model's inputs.
            metadata_preprocess: preprocessing from the model's metadata, of a `LoadedModel`.
            labels_by_folder: number the subfolders and use the numbers as class labels.
            recurrence: how the model may feed itself states, inputs that take an output of the step
                before, by their names and shapes; None if the model is not to be run.

        Raises:
            FeedError: no samples, or samples that do not fit the inputs.
            ConfigError: options that do not apply to the source.
        """
        if not specs:
            raise FeedError("a model must have an input to be fed, got none; check the model")
        if self.batch_axis != AUTO or any(spec.has_batch is None for spec in specs):
            specs = mark_batch_axes(specs, choice=self.batch_axis)  # sets their `has_batch`
        source = self.source
        if is_loader_spec(source):
            source = cast("FeedSource", call_loader(str(source)))
        files = _resolve_source_files(source, self.split)  # None for Python objects
        if labels_by_folder:
            if files is None:
                raise ConfigError("labels by folder are of files in folders, got no path; give one")
            files = label_by_folder(files)

        opener = _SourceOpener(
            dataset=self,
            choice=to_choice(self.limit),
            specs=tuple(specs),
            metadata_preprocess=metadata_preprocess,
        )
        resolved = self._resolve_recurrence(specs, recurrence)
        if resolved is not None:  # the model has states, which the samples may hold or lack
            holds_states, source = opener.probe_first_sample(source, files)
            if not holds_states:
                # the samples hold the other inputs, and the model makes the states
                opener = replace(opener, specs=resolved.data_inputs, recurrence=resolved)
            elif resolved.is_set_by_user:
                # as the user wants, the model makes the states here too; those of the samples are
                # used in the first step of each sequence. Otherwise they are plain inputs
                opener = replace(opener, recurrence=resolved)
        return opener.open(source, files)

    def _resolve_recurrence(
        self, specs: Sequence[TensorSpec], recurrence: Recurrence | None
    ) -> Recurrence | None:
        """Return how the model feeds itself states; None if it has none, or is not to be run.

        If the user names states, they replace those that names and shapes show.

        Args:
            specs: the model's inputs, with what their first dimension is.
            recurrence: see `open`; None if the model is not to be run: then none can be computed.

        Raises:
            ConfigError: the states are no dict, or not those of a float model that can be run.
        """
        if self.states and not isinstance(self.states, Mapping):
            raise ConfigError(
                f"states are a dict of an input and the output that it takes, got {self.states!r}"
            )
        if recurrence is None:
            if self.states:
                raise ConfigError(
                    "states are followed where one float model runs, got"
                    f" {', '.join(self.states)}; leave --state out, and put them into the samples"
                )
            return None
        resolved = replace(recurrence, inputs=tuple(specs))
        if self.states:
            resolved = resolved.with_states(self.states)
        return resolved if resolved.states else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _SourceOpener:
    """Opens the source of a `Dataset` for a model.

    Attributes:
        dataset: the options of the user.
        choice: `dataset.limit`.
        specs: the inputs that the samples hold.
        metadata_preprocess: preprocessing from the model's metadata.
        recurrence: how the model feeds itself states that the samples lack; None without states.
    """

    dataset: Dataset
    choice: Choice
    specs: Specs
    metadata_preprocess: MetadataPreprocess | None
    recurrence: Recurrence | None = None

    def probe_first_sample(
        self, source: FeedSource, files: SourceFiles | None
    ) -> tuple[bool, FeedSource]:
        """Look at the first sample of a model with states; return (whether it holds them, source).

        It holds them if it holds all inputs, `specs`. The returned source gives the first sample
        again, also if the given one can be read only once, such as a generator.

        `files`: the files of the source; None if it is a Python object.
        """
        if isinstance(source, CalibratorScript):  # which gives all inputs, by their names
            return True, source
        if files is None:
            return first_item_fits(source, self.specs)
        if not files.are_arrays:  # an image is a single input, no state
            return False, source
        try:  # errors in other files than the first are reported when all are opened
            self._open_arrays(files, self.specs, skip_bad=True).load(0)
        except FeedError:  # it lacks the states, or is damaged, which is reported then, too
            return False, source
        return True, source

    def open(self, source: FeedSource, files: SourceFiles | None) -> Feed:
        """Return the feed of a source, opened by its kind.

        Args:
            source: a path, files without a header (`RawFiles`), a calibrator's script, or a Python
                object with samples.
            files: the files that a path or a list of paths resolves to; None for other sources.

        Raises:
            FeedError: no samples, or samples that do not fit the inputs.
            ConfigError: options that do not apply to the source.
        """
        if isinstance(source, CalibratorScript):
            return self._open_calibrator(source)
        if files is None:
            return self._open_object(source)
        if not isinstance(source, RawFiles) and not files.are_arrays:
            return self._open_images(files)
        if self.dataset.preprocess is not None:
            raise ConfigError(
                "files of arrays are fed as they are, got preprocessing for them; leave it out, or"
                " feed images"
            )
        if isinstance(source, RawFiles):
            return self._open_raw_files(source, files)
        arrays = self._open_arrays(files, self.specs, skip_bad=self.dataset.skip_bad)
        return self._create_feed(arrays)

    def _open_raw_files(self, raw_files: RawFiles, files: SourceFiles) -> Feed:
        """Return the feed of files without a header, which hold values of the only input.

        Args:
            raw_files: their path, and the shape and dtype that the user gave.
            files: the files.
        """
        refuse_files_with_header(files)
        if len(self.specs) != 1:
            raise ConfigError(
                f"a raw shape and dtype are of one input, the model has {len(self.specs)}; write"
                " .npy files, which say theirs"
            )
        (spec,) = self.specs
        sample_shape = raw_files.sample_shape(spec)
        # None: a file holds any number of samples
        file_shape = (None, *sample_shape) if spec.has_batch else sample_shape
        file_spec = replace(spec, dtype=raw_files.dtype or spec.dtype, shape=file_shape)
        arrays = self._open_arrays(files, (file_spec,), skip_bad=self.dataset.skip_bad)
        # raises if the samples do not fit the model's input: all have one shape and dtype, so a
        # sample of zeros stands for them
        zeros = {spec.name: np.zeros((1, *sample_shape), file_spec.dtype)}
        count_samples(zeros, self.specs, f"each sample of {arrays.name}")
        # `file_spec` was for reading the files; the samples are fed as the model's input
        batch = samples_per_run(self.specs)
        return self._create_feed(replace(arrays, specs=self.specs, batch=batch))

    def _open_images(self, files: SourceFiles) -> Feed:
        """Return the feed of images, or of a video."""
        # registered, so that no output file overwrites an image
        add_input_files(len(files.file_list), path_of=files.file_list.path)
        preprocessing = self._resolve_preprocess()  # for the only input: it refuses several
        spec = self.specs[0]
        preprocess = preprocessing.preprocess
        video = _open_video(files, spec, preprocess)
        if video is not None:
            return self._create_feed(
                video,
                preprocessing,
                kind="images",
                notes=files.notes,
                default_every=video.frames_per_second,  # one frame a second
            )

        if not self.dataset.skip_bad:  # a missing file is found now, not in the middle of the run
            shard_number, shard_count = self.choice.shard or (1, 1)  # shards count from 1
            chosen_indices, _ = self.choice.choose(len(files.file_list))
            # only these are read on this machine
            shard_indices = chosen_indices[shard_number - 1 :: shard_count]
            shard_files = (files.file_list[index] for index in shard_indices)
            check_present(shard_files, len(shard_indices), files.name)
        source = ImageSource(files.file_list, spec, preprocess, self.dataset.max_pixels)
        return self._create_feed(source, preprocessing, kind="images", notes=files.notes)

    def _open_calibrator(self, script: CalibratorScript) -> Feed:
        if self.dataset.preprocess is not None:
            raise ConfigError(
                f"a calibrator's batches are fed as they are, got preprocessing for {script};"
                " leave it out"
            )
        return self._create_feed(script.source(self.specs, self.choice.required_samples))

    def _open_object(self, source: FeedSource) -> Feed:
        """Return the feed of a Python object, whose items are arrays, or images to be preprocessed.

        They are images if there is preprocessing.
        """
        items, has_end = iterate_items(source)
        limit = self.choice.required_samples
        remedy = ""
        if isinstance(source, Iterator):  # the user's own: it may have been read before
            remedy = (
                "; an iterator can be read only once: give a list, or a function that returns a new"
                " iterator"
            )
        open_items = partial(open_iterable, has_end=has_end, limit=limit, remedy=remedy)
        if self.dataset.preprocess is None:
            return self._create_feed(open_items(items, self.specs))
        preprocessing = self._resolve_preprocess()
        inputs = preprocess_items(items, preprocessing.preprocess, self.specs[0].dtype)
        arrays = open_items(inputs, self.specs)
        return self._create_feed(arrays, preprocessing, kind="pictures in memory")

    def _open_arrays(self, files: SourceFiles, specs: Specs, *, skip_bad: bool) -> ArraySource:
        """Return the arrays in files.

        Args:
            files: files of arrays.
            specs: what the arrays are to be: the model's inputs, or what raw files hold.
            skip_bad: count a file with an error as one sample; the feed then skips this sample.

        Raises:
            FeedError: a file does not fit the inputs, unless `skip_bad`; or there are no samples.
        """
        arrays = open_array_files(files.file_list, specs, files.name, skip_bad=skip_bad)
        first_file = files.file_list[0]
        is_only_file = files.folder is None and len(files.file_list) == 1
        # samples of a single file are named by their number in it, as the C++ library does. A file
        # with a label comes from a list, and is named as there; so is a missing one, which is here
        # only with `skip_bad`
        if is_only_file and first_file.label is None and first_file.path.exists():
            file_name = printable_name(first_file.path.name)
            arrays = replace(arrays, name=file_name, item_names=())
        return replace(arrays, notes=(*files.notes, *arrays.notes))

    def _resolve_preprocess(self) -> ResolvedPreprocess:
        """Return the preprocessing for the model's only input."""
        if len(self.specs) != 1:
            raise FeedError(
                f"images feed one input, the model has {len(self.specs)}:"
                f" {summarize_names([describe(spec) for spec in self.specs])}; give a folder of"
                " .npz files with one array an input, or one folder of .npy files an input"
            )
        (spec,) = self.specs
        row_count = spec.shape[0] if spec.shape else 1
        if isinstance(row_count, int) and row_count > 1 and not spec.has_batch:
            raise FeedError(
                f"each image is a sample, the input {describe(spec)} takes {row_count} rows as one;"
                " feed arrays of this shape, or set --batch-axis 0 if each row is a sample"
            )
        preprocessing = resolve_preprocess(self.dataset.preprocess, self.metadata_preprocess, spec)
        check_dtype(spec, preprocessing.preprocess)
        return preprocessing

    def _create_feed(
        self,
        source: SampleSource,
        preprocessing: ResolvedPreprocess | None = None,
        *,
        kind: str = "arrays",
        notes: tuple[str, ...] = (),
        default_every: int = 1,
    ) -> Feed:
        """Return the feed of the chosen samples of a source, or of this shard's share of them.

        Args:
            source: all samples.
            preprocessing: the preprocessing of images, and its origin: who chose it, for messages.
                None for arrays.
            kind: of the samples, as manifests store it: "arrays", "images" or "pictures in memory".
            notes: on the source.
            default_every: default step N of "every N-th sample".
        """
        specs = self.specs
        batch = samples_per_run(specs)  # images or rows of each run; 1 unless the model fixes more
        if isinstance(source, ArraySource):
            batch = source.batch
            notes += source.notes
            specs = source.specs  # with what the samples show of their first dimension
        if preprocessing is not None:
            notes += preprocessing.notes

        if self.recurrence is None:
            chosen_indices, choice_notes = self.choice.choose(
                len(source), default_every=default_every
            )
        else:
            refuse_batches(batch, "states are of one sequence at a time")
            source = SequenceSource(source, self.recurrence)  # adds the states to the samples
            specs = self.recurrence.inputs  # all inputs of the model, states too
            chosen_indices, choice_notes = choose_steps(self.choice, source)
        notes += tuple(choice_notes)

        feed = Feed(
            source,
            chosen_indices,
            specs=specs,
            kind=kind,
            batch=batch,
            preprocess=None if preprocessing is None else preprocessing.preprocess,
            skip_bad=self.dataset.skip_bad,
            notes=notes,
            origin="" if preprocessing is None else preprocessing.origin,
            has_assumed_scale=preprocessing is not None and preprocessing.has_assumed_scale,
        )
        if self.choice.shard is None:
            return feed
        return feed.open_share(feed.get_share(self.choice.shard))


def _open_video(files: SourceFiles, spec: TensorSpec, preprocess: Preprocess) -> VideoSource | None:
    """Return the source if the only file is a video, None if no file is a video."""
    videos = [file for file in files.file_list if is_video(file.path)]
    if not videos:
        return None
    if len(files.file_list) > 1 or videos[0].label is not None:
        raise FeedError(
            f"a video is fed alone and without a label, got {printable_name(videos[0].name)} in"
            f" {files.name}; give it by itself, or its frames as images"
        )
    return VideoSource(videos[0].path, spec, preprocess)


def to_dataset(
    images: FeedSource | Dataset,
    *,
    preprocess: PreprocessRequest = None,
    skip_bad: bool = False,
    limit: Limit = None,
    split: Split = "train",
    batch_axis: str = AUTO,
    states: Mapping[str, str] | None = None,
) -> Dataset:
    """Return a `Dataset` of a source with these options.

    If `images` is a `Dataset`, it is returned as it is, and the options are ignored. The options
    are the fields of `Dataset`; None for `states` stands for no states.
    """
    if isinstance(images, Dataset):
        return images
    return Dataset(
        source=images,
        preprocess=preprocess,
        skip_bad=skip_bad,
        limit=limit,
        split=split,
        batch_axis=batch_axis,
        states=states or {},
    )


def open_feed(
    source: FeedSource,
    specs: Sequence[TensorSpec],
    *,
    preprocess: PreprocessRequest = None,
    skip_bad: bool = False,
    limit: Limit = None,
) -> Feed:
    """Open a source with these options for a model with these inputs, see `Dataset`."""
    dataset = to_dataset(source, preprocess=preprocess, skip_bad=skip_bad, limit=limit)
    return dataset.open(specs)


def is_array_dataset(dataset: Dataset) -> bool:
    """Return whether a data set is array files or a calibrator, which take no preprocessing.

    Raises:
        FeedError: there are no files, or both images and arrays.
    """
    source = dataset.source
    if is_loader_spec(source):
        return False  # the loader may return images
    files = _resolve_source_files(source, dataset.split)
    return isinstance(source, CalibratorScript) or (files is not None and files.are_arrays)


def _resolve_source_files(source: FeedSource, split: Split) -> SourceFiles | None:
    """Return the files that a path or a list of paths resolves to; None for other sources.

    Raises:
        ConfigError: an empty path, which would be the current folder, or an address.
        FeedError: there are no such files.
    """
    if isinstance(source, RawFiles):
        source = source.path
    if isinstance(source, str | os.PathLike):
        refuse_no_path(source)
        add_input_file(Path(source))  # it may be a list; the files are added when they are opened
        return resolve_files(Path(source), split=split)
    if isinstance(source, list | tuple):
        return resolve_path_list(source)
    return None


def describe_preprocessing(feed: Feed) -> str:
    """Describe the preprocessing of images, its origin, and what one sample is, if not plain."""
    texts = []
    if feed.preprocess is not None:
        texts.append(describe_preprocess(feed.preprocess))
        if feed.origin:
            texts.append(f"from {feed.origin}")
    if feed.sample_text:
        texts.append(feed.sample_text)
    return "; ".join(texts)


def preprocessing_notes(feed: Feed) -> tuple[str, ...]:
    """Return `describe_preprocessing` and the notes, for reports without a field for them."""
    description = describe_preprocessing(feed)
    if not description:
        return feed.notes
    subject = "samples" if feed.preprocess is None else "pictures"
    return (f"{subject}: {description}", *feed.notes)
