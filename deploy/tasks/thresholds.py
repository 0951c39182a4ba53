"""Thresholds of the forms of outputs, all in one place, each with its reason.

A form is certain or it is not used: outputs without a form are compared by their values.
"""

# --- boxes: a row of numbers per anchor, cell or query ---
BOX_SCORE = 0.25  # above it a box counts, as in Ultralytics' predict
MIN_BOX_SCORE = 0.05  # above it a box is evaluated by its annotations
IOU = 0.5  # above it two boxes are the same, for suppression and for matching
MIN_MASK_IOU = 0.75  # of the masks of two boxes
MIN_VISIBILITY = 0.5  # of a key point of a box that counts
MAX_BOX_POINT_DISTANCE = 0.1  # mean distance of a box's key points, relative to its size
UNIT_TOLERANCE = 1e-3  # rounding of a probability by float16 and resizing
MIN_ANCHORS = 10  # fewer rows are classes of a few steps
MIN_ROWS_PER_COLUMN = 2  # anchors are many more than the numbers of one, unless there are 100
MIN_QUERIES = 100  # queries of a DETR, which may be fewer than its numbers
MAX_EMPTY_SCORE = 0.1  # best probability of a row that detects nothing; half of all rows or more
MIN_BACKGROUND_SHARE = 0.8  # share of rows that the background wins in front of a Softmax
MIN_CODED_SHARE = 0.99  # share of boxes with ordered corners, or with sizes that are not negative
MIN_CORNER_CORRELATION = 0.3  # corners move together, offsets and sizes do not
MAX_RELATIVE_CORNER = 2.0  # larger numbers of boxes are in pixels
MAX_OUTSIDE_PICTURE = 0.1  # distance of a centre to the picture, relative to its side
MIN_INSIDE_SHARE = 0.95  # share of boxes whose centre is nearer than that
MIN_CENTRE_SPREAD = 0.1  # deviation of the centres, relative to the picture: a grid has 0.29
MIN_POINT_CORRELATION = 0.8  # key points of a box move with its centre
MAX_CELL_OFFSET = 16.0  # YOLOX's raw boxes: cells from the anchor, and the logarithm of a size
DISTRIBUTION_BINS = 8, 16, 17  # m + 1 of a distance; 9 anchors a cell have 9 numbers of a side
MIN_QUIET_SCORE = 0.02  # mean score below which rows do not show an objectness
MIN_LIST_ROWS = 3  # rows of a list of boxes, which show its columns

# --- steps and text ---
MAX_UNDECIDED_SHARE = 0.25  # share of probabilities between `LOW` and `HIGH`
MIN_SYMBOLS = 11  # digits and a blank
MIN_BLANK_SHARE = 0.2  # share of steps that CTC leaves blank
MAX_WORD_STEPS = 16  # mean number of steps between blanks
MAX_SYMBOL_STEPS = 3  # mean number of steps of one symbol: CTC's symbols are peaks

# --- a vector per sample: classes, labels, embeddings ---
MIN_NEIGHBOUR_VECTORS = 8  # vectors that have a nearest neighbour
MIN_EMBEDDING_SIZE = 32  # numbers of an embedding; of as many raw scores the best stands out
MIN_STAND_OUT = 1.2  # best raw score, relative to the expected maximum of normal numbers
MAX_TANH = 1.05  # values of few raw scores, which leave the range of a Tanh
MAX_LOGIT_DRIFT = 0.5  # deviation of few raw scores' mean, relative to that of the scores
MAX_POSE_NUMBERS = 6  # numbers of a pose: angles, a rotation, a direction
MAX_COMMON_MOTION = 0.5  # variance of a pose's mean, relative to independent numbers
FEATURE_FACTOR = 16  # widths of networks are multiples of it, ImageNet's 1000 classes are not
MIN_ACTIVATION = -0.375  # least value of HardSwish, the lowest of the activations
MIN_L1_NORM = 2.0  # of a normalised vector: less may be probabilities of a few classes
MAX_MEAN_SHARE = 0.25  # mean of an embedding's numbers, in standard deviations
MAX_SIDE_RATIO = 1.6  # largest number to one side of 0, relative to the other side
MAX_NORMAL_PEAK = 1.5  # largest number of an embedding, relative to that of normal numbers

# --- key points ---
MAX_POINTS = 600  # points of an output: a mesh of a face has 468
MEAN_COORDINATE = 0.15, 0.85  # range of the mean coordinate, relative to the picture's side
COORDINATE_SPREAD = 0.01, 0.5  # range of a sample's deviation, relative to the picture's side
MAX_POINT_OUTSIDE = 0.5  # distance of a point to the picture, relative to its side
MAX_RELATIVE_COORDINATE = 1.5  # larger ones are in pixels
MAX_END_DISTANCE = 0.02  # values as near to 0 or 1 are probabilities
MAX_END_SHARE = 0.25  # share of relative coordinates that are as near
MIN_VISIBLE = 0.2  # confidence of a point that is present
MAX_POINT_DISTANCE = 0.03  # of matching points, relative to the extent of a sample's points
MAX_SIMCC_PIXELS = 2  # distance of matching points

# --- values ---
MIN_VARIATION = 1e-3  # change of outputs from sample to sample, relative to the first one's
SUM_ROUNDING = 1e-2  # error of a sum of probabilities, or of a vector's length, in float16

# --- slices of an output ---
MIN_FORM_SAMPLES = 4  # samples from which the form of large outputs is derived
MAX_FORM_SAMPLES = 32  # samples from which the form of outputs of few values is derived
MIN_UNIT_RATIO = 8.0  # of every row of the larger unit to any of the smaller
MAX_SILENT_PEAK = 0.01  # rows whose peak stays below it show no unit
MIN_ROW_VALUES = 16  # fewer values per row (as in [N, classes]) do not show its range

# --- maps over a picture ---
MIN_MAP_SIDE = 16  # pixels of a side; smaller maps are features
MIN_EQUAL_NEIGHBOURS = 0.9  # share of neighbouring pixels of one class
MIN_NEGATIVE_SHARE = 0.2  # share of raw scores below 0; a picture has none
MAX_RARE_SHARE = 1e-3  # share of all pixels up to which a class is left out of mIoU
MIN_CLASS_PIXELS = 16  # pixels of a class that counts where all others are background
MAX_MASKS = 4  # channels of an output of masks
MAX_PICTURE_CORRELATION = 0.9  # of masks with the picture: an enhanced picture is no mask
MAX_MASK_EXCESS = 0.15  # distance to [0, 1] of masks without a final Sigmoid
MIN_MASK_SHARE = 5e-4  # share of pixels above 0.5 in masks that show anything
MAX_PEAK_SHARE = 0.05  # share of a heat map's pixels above half of its peak
HEAT_RANGE = -0.3, 1.5  # values of heat maps, which are trained to be 0 to 1

# --- shared by several forms ---
LOW, HIGH = 0.1, 0.9  # probabilities between them are undecided
MIN_COUNT = 4  # fewer steps, labels, points or bins are numbers of something else
MIN_ORDERED = 8  # fewer numbers, such as points or classes, do not show an order
MIN_CONFIDENCE = 0.8  # mean probability of the best of raw scores that a Softmax belongs to
MOST_SHARE = 0.75  # of values: of sure pixels, places of the usual class
MIN_ORDER = 0.6  # correlation of numbers in an order with those before, as of points or signals
MAX_MASK_SCALE = 8  # scale of the picture to masks
MAX_CLASS_SCALE = 4  # the same to raw scores of pixels; smaller maps are features
